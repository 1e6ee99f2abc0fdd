"""A training for a process of its own: prints its peak address space, or fails for want of it.

Arguments: plain or recompute; the limit in bytes, 0 for none.
"""

import resource
import sys
from pathlib import Path

import keras
import numpy as np

from tfscale.callbacks import Recompute

BATCH, WIDTH, DEPTH = 65536, 128, 8


def main(how, limit):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(DEPTH):
        x = keras.layers.Dense(WIDTH, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((BATCH, WIDTH), "float32")
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    callbacks = [Recompute(fraction=0.4, verbose=0)] if how == "recompute" else []
    model.fit(x, x[:, :1], BATCH, verbose=0, callbacks=callbacks)
    (peak,) = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmPeak")
    ]
    print(f"trained: {peak}")


main(sys.argv[1], int(sys.argv[2]))
