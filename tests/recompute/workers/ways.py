"""A process that trains in several ways, with plans of single results and without recomputation.

It prints the names of the ways whose bits were the same. The test starts it without oneDNN.
"""

from __future__ import annotations

import keras

from tests.recompute.models import assert_same_training, chain, images
from tests.recompute.orders import OwnStep, RandomOrder
from tfscale.callbacks import Recompute


def build() -> keras.Model:
    return chain(depth=6, shape=(64, 64))


def build_own() -> keras.Model:
    model = build()
    return OwnStep(model.inputs, model.outputs)


def assert_cheapest_is_the_same(build=build, **settings) -> None:
    callback = Recompute(fraction=0.7, verbose=0, seconds=4)
    plan = assert_same_training(build, callback, **settings)
    assert plan.events is not None, "segments are cheaper, and were to be tested by others"


def mixed() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert_cheapest_is_the_same()
    finally:
        keras.config.set_dtype_policy("float32")


WAYS = {
    "fit": assert_cheapest_is_the_same,
    "own step": lambda: assert_cheapest_is_the_same(build_own),
    "mixed": mixed,
    "two steps": lambda: assert_cheapest_is_the_same(steps_per_execution=2),
    "open batch": lambda: assert_cheapest_is_the_same(batch=7),
    "convolutions": lambda: assert_same_training(
        lambda: images(keras.layers.BatchNormalization), RandomOrder(seed=1)
    ),
}

if __name__ == "__main__":
    for name, train in WAYS.items():
        train()
        print("\nSAME", name, flush=True)
