"""Results of operators on small nets, as numbers to compare between devices and workers."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf

from tests.curvature import nets
from tfscale import curvature

# Nets, rows of a global batch (the last batch has one row), and whether layers train.
CASES = {
    "weights": (nets.by_weights, 16, False),
    "others": (nets.by_weights, 16, False),
    "masks": (nets.masked, 8, False),
    "batch norm": (nets.normalized, 16, True),
    "own loss": (nets.own_loss, 16, False),
}


def measured(strategy, cases):
    """Return by case the loss, products of the Hessian, and products of some other matrices."""
    found = {}
    for name in cases:
        build, batch, training = CASES[name]
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model, data = build()
        data = tf.nest.map_structure(_single, data)
        h = curvature.Hessian(model, *data, batch_size=batch, training=training)
        v = np.random.default_rng(2).standard_normal(h.size)
        if name != "others":
            found[name] = [h.loss, *(h @ v)]
            continue
        others = [curvature.GaussNewton, curvature.Fisher]
        of_others = [kind(model, *data, batch_size=batch) @ v for kind in others]
        drawn = curvature.Fisher(model, *data, batch_size=batch, kind="sampled") @ v
        found[name] = np.concatenate([*of_others, drawn]).tolist()
        found["top"] = list(h.eigenvalues(top=2, tolerance=1e-3).top)
    return found


def _single(x):
    return x.astype(np.float32) if x.dtype == np.float64 else x


def told(strategy, cases):
    """Return the measured numbers as a line of text."""
    return json.dumps(
        {name: [float(n) for n in each] for name, each in measured(strategy, cases).items()}
    )
