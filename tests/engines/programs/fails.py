"""A training whose second task fails in an epoch."""

import os

import keras
import numpy as np

import tfscale

strategy = tfscale.ScaleStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if os.environ["SLURM_PROCID"] == "1":
            raise KeyError("no such row")


x = np.zeros((8, 4))
model.fit(x, x[:, :1], batch_size=4, epochs=100, verbose=0, callbacks=[Fails()])
