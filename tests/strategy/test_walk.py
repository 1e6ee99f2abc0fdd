"""Calls and files that a gradient passes from ``strategy.run`` to the op."""

import sys
import threading
import traceback
from pathlib import Path

import keras
import numpy as np

import tfscale
from tfscale.native import library

PACKAGE = Path(tfscale.__file__).parent
# Of the whole walk, and of its part before the reducer.
CALLS, FILES = 14, 8
CALLS_BEFORE, FILES_BEFORE = 5, 3
RUN, REDUCE = ("strategy/strategy.py", "run"), ("exchange/reducer.py", "reduce")


def calls(frame):
    """Return file and name of each call of tfscale in a stack, from the first one on."""
    stack = [(Path(one.filename), one.name) for one in traceback.extract_stack(frame)]
    return [
        (str(file.relative_to(PACKAGE)), name) for file, name in stack if PACKAGE in file.parents
    ]


def walked(monkeypatch):
    """Return the calls of tfscale between ``strategy.run`` and the op, while a step is traced.

    TensorFlow traces a replica's step in a thread, for which the main thread waits.
    """
    found, ops = [], library.load()

    class Ops:
        def tfscale_all_reduce(self, *args, **kwargs):
            main = calls(sys._current_frames()[threading.main_thread().ident])
            if RUN in main:
                found.append(main[main.index(RUN) :] + calls(sys._getframe(1)))
            return ops.tfscale_all_reduce(*args, **kwargs)

        def __getattr__(self, name):
            return getattr(ops, name)

    devices = ["CPU:0", "CPU:1"]
    with tfscale.ScaleStrategy("ring", devices=devices).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    replaced = Ops()
    monkeypatch.setattr(library, "load", lambda: replaced)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
    return [each for each in found if REDUCE in each]


def test_a_gradient_passes_few_calls_in_few_files(monkeypatch):
    walk, *_ = walked(monkeypatch)
    before = walk[: walk.index(REDUCE)]
    assert len(before) <= CALLS_BEFORE and len({file for file, _ in before}) <= FILES_BEFORE
    assert len(walk) <= CALLS and len({file for file, _ in walk}) <= FILES
