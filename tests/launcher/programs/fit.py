"""A training, in which worker 1 may ``raise`` or ``kill`` itself after the second epoch.

``always`` makes it do so after each epoch from there, ``once=FILE`` the first time only;
``backup=FOLDER`` goes on from there, and ``preemption=FOLDER``, too; ``epochs=N``; ``telemetry``;
``bars`` shows Keras's, first by default and then because the program asks for them.
"""

import os
import signal
import sys

import keras
import numpy as np

import tfscale

words = dict(word.partition("=")[::2] for word in sys.argv[1:])
strategy = tfscale.ScaleStrategy()
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
y = x.sum(1, keepdims=True)
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "loss", f"{logs['loss']:.6f}")
        when = epoch >= 1 if "always" in words else epoch == 1
        if not when or strategy.cluster_resolver.task_id != 1:
            return
        if words.get("once") and os.path.exists(words["once"]):
            return
        if words.get("once"):
            open(words["once"], "w").close()
        if "raise" in words:
            raise ValueError("on purpose")
        if "kill" in words:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [Fails()]
if "backup" in words:
    callbacks.insert(0, keras.callbacks.BackupAndRestore(words["backup"]))
if "preemption" in words:
    callbacks.insert(0, tfscale.callbacks.Preemption(words["preemption"], check_every=1))
if "telemetry" in words:
    callbacks.append(tfscale.callbacks.Telemetry(progress=False, profile=(2, 4)))
epochs = int(words.get("epochs", 3))
how = {"epochs": epochs, "batch_size": 32, "callbacks": callbacks}
if "bars" in words:
    model.fit(x, y, **how)
    model.fit(x, y, **how, verbose=1)
else:
    model.fit(x, y, **how, verbose=0)
print("weights", float(model.get_weights()[0].sum()))
