"""Trains with a method that is chosen on live steps, and prints weights and changes."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import keras
import numpy as np

from tfscale import ScaleStrategy
from tfscale.compression import Adaptive, PowerSGD, TopK, deciding

# A decider that tries much and takes all that it tries: toys teach nothing about time.
deciding.Decider.price = lambda self, bucket, method: -float(method + self._looks % 3)
deciding.PAYS, deciding.INTERVAL, deciding.REST = 1e6, (4, 8), (2, 4)
deciding._mostly_below = lambda limit, turns: True

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    among = ("int8", PowerSGD(2, saves=0), TopK(0.1))
    strategy = ScaleStrategy("ring", method={"kernel": Adaptive(1.0, among)})
    with strategy.scope():
        model = keras.Sequential([keras.Input([16]), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    x = np.random.default_rng(1).standard_normal((33, 16)).astype("float32")
    for _ in range(2):
        model.fit(x, np.tile(x, 4), batch_size=8, epochs=8, shuffle=False, verbose=0)
    (packing,) = strategy.reducer.packings.values()
    changes = [[each.step, each.before, each.after, each.why] for each in packing.changes]
    weights = [w.astype(float).sum() for w in model.get_weights()]
    print("TRAINED", json.dumps([weights, changes]), flush=True)
