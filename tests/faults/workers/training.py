"""A worker of a training with backups and validation, in which one of all meets a FAULT.

FAULT is a JSON object, or empty: see campaign.py. Prints HERE, FAULT and ERROR with the time: when
this worker begins, when the fault comes, and when and with what the training ended. Prints AT with
the epoch that the training begins with, STATE with the steps so far and a digest of the state,
SAVED with the epochs of backups, ENDS when the last epoch has ended, END with a digest of the
trained state, and PREEMPTED with a digest of what was saved then. With WHOLE, trains once more,
without backups, and prints the digest of that.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time

import keras
import numpy as np

import tfscale
from tests.strategy.restless import make_restless
from tfscale.parallel import deal

CONFIG = json.loads(os.environ["TF_CONFIG"])
ME = CONFIG["task"]["index"]
FAULT = json.loads(os.environ["FAULT"] or "{}")
EPOCHS, STEPS, BATCH = 3, 3, 12
EXIT_CODE, PREEMPTED = 3, 75
COMING = []  # a fault that was announced
SIGNALS = {
    "kill": signal.SIGKILL,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
    "pause": signal.SIGSTOP,
    "term": signal.SIGTERM,
}


def note(word, *more):
    print(f"\n{word}", time.time(), *more, flush=True)


def meets(moment):
    return FAULT.get("moment") == moment and FAULT["victim"] == ME


def happen():
    note("FAULT")
    kind = FAULT["kind"]
    if kind == "raise":
        raise KeyError("no such row")
    if kind == "exit":
        sys.exit(EXIT_CODE)
    if kind in SIGNALS:
        os.kill(os.getpid(), SIGNALS[kind])


def happen_soon():
    """Start the fault while the next calls are under way; raise an exception now."""
    if FAULT["kind"] in ("raise", "exit"):
        happen()
    else:
        COMING.append(threading.Timer(FAULT["delay"], happen))
        COMING[-1].start()


class Watch(keras.callbacks.Callback):
    """Comes before the backup."""

    def __init__(self):
        super().__init__()
        self.epoch = EPOCHS

    def on_epoch_begin(self, epoch, logs=None):
        if self.epoch == EPOCHS:
            print(f"\nAT {epoch}", flush=True)
            steps = self.model.optimizer.iterations.numpy()
            print(f"\nSTATE {steps} {digest(self.model)}", flush=True)
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if meets("step") and (self.epoch, batch) == (FAULT["epoch"], FAULT["step"]):
            happen_soon()

    def on_test_batch_end(self, batch, logs=None):
        if meets("validation") and (self.epoch, batch) == (FAULT["epoch"], 0):
            happen_soon()

    def on_epoch_end(self, epoch, logs=None):
        if meets("save") and epoch == FAULT["epoch"]:
            happen_soon()

    def on_train_end(self, logs=None):
        print("\nENDS", flush=True)
        if meets("end"):
            happen_soon()


class Saved(keras.callbacks.Callback):
    """Comes after the backup."""

    def on_epoch_end(self, epoch, logs=None):
        print(f"\nSAVED {epoch + 1}", flush=True)


def backup():
    settings = {"double_checkpoint": bool(FAULT.get("double"))}
    folder = os.environ["FOLDER"]
    if os.environ["PREEMPTION"]:
        settings["exit_code"] = PREEMPTED
        return tfscale.callbacks.Preemption(folder, check_every=2, **settings)
    return keras.callbacks.BackupAndRestore(folder, **settings)


def digest(model):
    state = {str(i): v.numpy() for i, v in enumerate([*model.weights, *model.optimizer.variables])}
    model.optimizer._tfscale_memory.save_own_variables(state)
    values = [np.asarray(state[key]).tobytes() for key in sorted(state)]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def how_and_when():
    """The wire or the method, the rule, the shares of the batch, and how workers share a model."""
    if os.environ.get("GRID"):
        deal.SMALL = 1  # the model is small
        names = {"Grid": tfscale.Grid, "Pipeline": tfscale.Pipeline}
        return {"wire": os.environ["WIRE"], **eval(f"dict({os.environ['GRID']})", names)}
    wire, shares = os.environ["WIRE"], eval(os.environ.get("SHARES") or "None")
    make_restless()
    if os.environ["SYNC"]:
        rule = eval(os.environ["SYNC"], vars(tfscale.sync))
        wires = {"wire": wire} if rule.bound else {}
        return {"sync": rule, "shares": shares, **wires}
    if "(" in wire:
        return {"method": eval(wire, vars(tfscale.compression)), "shares": shares}
    return {"wire": wire, "shares": shares}


def train(strategy, *callbacks):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input([8]), keras.layers.Dense(64, name="up"), keras.layers.Dropout(0.2)]
        model = keras.Sequential([*layers, keras.layers.Dense(1, name="down")])
        # Under rules the state of the inner optimizer is each replica's own: let there be none.
        make = keras.optimizers.SGD if os.environ["SYNC"] else keras.optimizers.Adam
        model.compile(make(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((BATCH * STEPS, 8), np.float32)
    y = x.sum(1, keepdims=True)
    how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, y, validation_data=(x, y), callbacks=list(callbacks), **how)
    except tfscale.callbacks.Preempted:
        print(f"\nPREEMPTED {digest(model)}", flush=True)
        raise
    return digest(model)


def main():
    note("HERE")
    if meets("join"):
        happen_soon()
    strategy = tfscale.ScaleStrategy(
        os.environ["SCHEDULE"],
        **how_and_when(),
        deadline=float(os.environ["DEADLINE"]),
        join_timeout=float(os.environ["JOIN_TIMEOUT"]),
    )
    if meets("start"):
        happen_soon()
    print(f"\nEND {train(strategy, Watch(), backup(), Saved())}", flush=True)
    if os.environ["WHOLE"]:
        print(f"\nWHOLE {train(strategy)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except tfscale.callbacks.Preempted:
        raise
    except BaseException as error:
        note("ERROR", type(error).__name__, " ".join(str(error).split()))
        raise
    for fault in COMING:
        fault.join()
