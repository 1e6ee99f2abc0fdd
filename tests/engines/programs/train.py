"""A training that is preempted after its third epoch and again after its fifth, and then ends.

It waits for the signal itself, which thus finds it in the same epoch on any machine. The first
worker notes the epochs that were trained in the file EPOCHS; at the end all print the weights.
"""

import json
import logging
import os
import time

import keras
import numpy as np

import tfscale

LAST = {"0": 2, "1": 4}  # epochs, by how often Slurm has requeued the job
STARTS = os.environ.get("SLURM_RESTART_COUNT", "0")
FIRST = os.environ.get("SLURM_PROCID", "0") == "0"

logging.basicConfig(level="INFO", format="%(message)s")
keras.utils.set_random_seed(1)
strategy = tfscale.ScaleStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse")
preemption = tfscale.callbacks.Preemption("backup", exit_code=75)


class Journal(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if FIRST:
            with open("EPOCHS", "a") as file:
                file.write(f"{epoch}\n")
        while epoch == LAST.get(STARTS) and not preemption._sigterm.heard:
            time.sleep(0.05)


x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
model.fit(
    x, x.sum(1, keepdims=True), batch_size=8, epochs=8, shuffle=False, verbose=0,
    callbacks=[Journal(), preemption],
)  # fmt: skip
weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()
print(f"TRAINED {strategy.num_replicas_in_sync} {json.dumps(weights)}", flush=True)
