"""Scenes are played on one device, on two devices of this process, and by two processes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tensorflow as tf

from tests.keras_like.scenes import check_same, played
from tests.strategy.groups import chosen, judge, take
from tests.strategy.twins import two

WORKER = Path(__file__).parent / "workers" / "like.py"


@pytest.fixture(scope="session")
def same_as_one_device(request):
    """Asserts that a scene looks in a layout as it does on one device."""
    strategy = functools.cache(two)
    make = functools.partial(take, str(WORKER), "scale", "2x1")

    @functools.cache
    def of_workers(scenes):
        return make(chosen(request, scenes, ["2x1"]))

    def ask(layout, scenes, name, tolerance=1e-6):
        expected = played(scenes[name], tf.distribute.get_strategy())

        def check(records):
            for worker, record in enumerate(records):
                assert "error" not in record, f"worker {worker}: {record['error']}"
                check_same(expected, record["seen"], tolerance)

        if layout == "1x2":
            check_same(expected, played(scenes[name], strategy()), tolerance)
        else:
            judge(check, of_workers(tuple(scenes))[name], lambda: make([name])[name])

    return ask
