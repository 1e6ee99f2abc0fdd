"""Trainings that end while they save, and are started again: a process for each, forked from one
that has imported all.

Reads orders, one JSON object a line: where the backups are, and how the training ends: "kill" at a
call that touches files (see kill_at.c), or "bytes", the most that a file may have. Prints a record
for each.
"""

import ctypes
import hashlib
import json
import os
import resource
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfscale

EPOCHS, STEPS, BATCH = 3, 2, 8
ARMED = 1  # the epoch whose save is the first that may be cut off


class Watch(keras.callbacks.Callback):
    """Notes what each epoch begins with, and begins to count where it is told to."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.begins = {}
        self.calls = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.begins[epoch] = [int(self.model.optimizer.iterations.numpy()), digest(self.model)]

    def on_epoch_end(self, epoch, logs=None):
        if epoch == ARMED and "kill" in self.order:
            ctypes.CDLL(None).kill_at(self.order["kill"])
        if epoch == ARMED and "bytes" in self.order:
            limit = self.order["bytes"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    def on_train_end(self, logs=None):
        self.calls = ctypes.CDLL(None).calls_so_far()


def digest(model):
    """Return a digest of weights, optimizer and residuals."""
    state = {str(i): v.numpy() for i, v in enumerate([*model.weights, *model.optimizer.variables])}
    model.optimizer._tfscale_memory.save_own_variables(state)
    values = [np.asarray(state[key]).tobytes() for key in sorted(state)]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def train(order):
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    keras.utils.set_random_seed(1)
    with tfscale.ScaleStrategy("ring", wire="ternary").scope():
        layers = [keras.Input([4]), keras.layers.Dense(16), keras.layers.Dropout(0.2)]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).standard_normal((BATCH * STEPS, 4), np.float32)
    watch = Watch(order)
    backup = keras.callbacks.BackupAndRestore(
        order["folder"], double_checkpoint=order.get("double", True)
    )
    how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(x, x.sum(1, keepdims=True), callbacks=[watch, backup], **how)
    calls = [watch.calls, ctypes.CDLL(None).calls_so_far()]
    return {"begins": watch.begins, "end": digest(model), "calls": calls}


def in_a_fork(order):
    """Run a training in a process of its own, and return its report, or how it ended."""
    with tempfile.TemporaryFile("w+") as told:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            ended = train(order)
            told.write(json.dumps(ended))
            told.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        text = told.read()
    return json.loads(text) if text else {"ended": os.waitstatus_to_exitcode(status)}


def main():
    for line in sys.stdin:
        order = json.loads(line)
        print(f"\nRECORD {json.dumps(in_a_fork(order))}", flush=True)


if __name__ == "__main__":
    main()
