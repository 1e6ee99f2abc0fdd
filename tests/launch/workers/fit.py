"""A training that says nothing of a cluster.

It prints the number of this worker before and after the strategy is made, what Keras shows by
default, how many replicas trained, and the weights.
"""

import json
import logging
import sys

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.cluster import this_worker

logging.basicConfig(level="INFO", format="%(message)s")
keras.utils.set_random_seed(1)
before = tfscale.rank()
strategy = tfscale.auto_strategy() if "auto" in sys.argv else tfscale.ScaleStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
print(f"RANK {before} {tfscale.rank()} {tfscale.is_first()}", flush=True)
y = x.sum(1, keepdims=True)
model.fit(x, y, batch_size=8, epochs=2, shuffle=False)
if "bars" in sys.argv:
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model.evaluate(data)
    model.predict(x)
    before = model.get_weights()
    model.fit(data)  # shuffle=True is Keras's default
    print("CHOSEN", flush=True)
    model.fit(x, y, batch_size=8, epochs=2, verbose=1)
    model.set_weights(before)
assert this_worker.configure() == this_worker.configure()  # nothing is left to do
weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()
print(f"TRAINED {strategy.num_replicas_in_sync} {json.dumps(weights)}", flush=True)
