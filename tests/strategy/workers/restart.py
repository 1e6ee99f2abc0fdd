"""A worker of a fit with a backup that all share.

KILL: an epoch in which worker KILLED ends itself, between two backups. PREEMPT: a step at
whose end worker 1 gets SIGTERM. CALLBACK: whose backup it is. METHOD: by which gradients are
summed. Prints EPOCH for each epoch it begins, and STATE with a digest of weights and optimizer at
the end of each epoch; DONE with the methods that were used. With SLOW, the first worker's disk is
slow, and a worker that leaves prints FOUND with a digest of the backup that is there. All leave
together, through a folder called MEETING.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tfscale.support import sealed
from tfscale.tools.bench.measure import leave, meet
from tfscale.tools.bench.methods import method_of

ME = json.loads(os.environ["TF_CONFIG"]).get("task", {"index": 0})["index"]
KILL, PREEMPT = int(os.environ.get("KILL", -1)), int(os.environ.get("PREEMPT", -1))
KILLED = int(os.environ.get("KILLED", 0))
EPOCHS, BATCH, ROWS = 4, 16, 64
CALLBACKS = {
    "keras": keras.callbacks.BackupAndRestore,
    "tfscale": lambda folder: tfscale.callbacks.Preemption(folder, check_every=2, exit_code=3),
}

RULES = {
    "every step": tfscale.sync.EveryStep,
    "rounds": lambda: tfscale.sync.DiLoCo(every=3, wire="int4"),  # over the ends of epochs
}


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = 0

    def on_epoch_begin(self, epoch, logs=None):
        optimizer = self.model.optimizer
        print("\nEPOCH", epoch, int(optimizer.iterations.numpy()), digest(self.model), flush=True)
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.epoch == KILL and batch == 1 and ME == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == PREEMPT and ME == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        print("\nSTATE", epoch, digest(self.model), flush=True)


def digest(model):
    state = [v.numpy() for v in [*model.weights, *model.optimizer.variables]]
    return hashlib.sha256(b"".join(value.tobytes() for value in state)).hexdigest()[:16]


def write_slowly(path, *rest, write=sealed.write):
    time.sleep(1)
    write(path, *rest)


def digest_of_backup():
    (file,) = Path(os.environ["FOLDER"]).glob("*.weights.h5")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def main():
    if "SLOW" in os.environ and ME == 0:
        sealed.write = write_slowly
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * int(os.environ["LAYOUT"].split("x")[1])
    tf.config.set_logical_device_configuration(cpu, devices)
    keras.utils.set_random_seed(1)
    sync = RULES[os.environ.get("RULE", "every step")]()
    method = method_of(os.environ["METHOD"]) if "METHOD" in os.environ else None
    strategy = tfscale.ScaleStrategy("ring", method=method, deadline=120, sync=sync)
    with strategy.scope():
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input([64]), dense(128, activation="tanh"), dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((ROWS, 64), np.float32)
    backup = CALLBACKS[os.environ["CALLBACK"]](os.environ["FOLDER"])
    how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    best = os.path.join(os.path.dirname(os.environ["FOLDER"]), "best", "{epoch}.keras")
    kept = keras.callbacks.ModelCheckpoint(best)
    held = (x[:BATCH], x[:BATCH, :1])
    callbacks = [Watch(), backup, kept]
    model.fit(x, x.sum(1, keepdims=True), callbacks=callbacks, validation_data=held, **how)
    print("\nDONE", sorted({row.method for row in strategy.explain()}), flush=True)


if __name__ == "__main__":
    place = (os.environ["MEETING"], "worker", ME, int(os.environ["LAYOUT"].split("x")[0]))
    try:
        main()
    except tfscale.callbacks.Preempted as preempted:
        if "SLOW" in os.environ:
            print("\nFOUND", digest_of_backup(), flush=True)
        meet(*place)
        os._exit(preempted.code)  # TensorFlow's servers do not always end well
    leave(*place)
