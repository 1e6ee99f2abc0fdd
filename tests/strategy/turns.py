"""Worker of these tests: it takes cases in turn, and prints a line of JSON for each.

STRATEGY is scale, sharded and all (scale with shard="optimizer" and "all"), rounded (sharded, with
weights_wire="bf16"), grid (scale with teams
of two replicas), shares (scale where the first replica takes three times as many rows), measured
(scale with shares that change after each step or two), tensorflow (scale on TensorFlow's
collectives), stock (TensorFlow's own strategy) or none (one device); LAYOUT is workers x devices,
of which KIND is CPU or GPU. All leave together, through a folder called MEETING.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback

import keras
import pytest
import tensorflow as tf

from tfscale.tools.bench.measure import leave

WORKERS, DEVICES = (int(number) for number in os.environ["LAYOUT"].split("x"))
ME = json.loads(os.environ["TF_CONFIG"]).get("task", {"index": 0})["index"]
KIND = os.environ.get("KIND", "CPU")
CASE_SECONDS, DEADLINE = 200, 100


def make_devices():
    physical = tf.config.list_physical_devices(KIND)
    if KIND == "GPU" and len(physical) >= DEVICES:
        return tf.config.set_visible_devices(physical[:DEVICES], "GPU")
    part = tf.config.LogicalDeviceConfiguration(memory_limit=2048 if KIND == "GPU" else None)
    tf.config.set_logical_device_configuration(physical[0], [part] * DEVICES)


def make_strategy(algorithm):
    if os.environ["STRATEGY"] == "none":
        return tf.distribute.get_strategy()
    if os.environ["STRATEGY"] == "stock":
        if WORKERS > 1:
            return tf.distribute.MultiWorkerMirroredStrategy()
        return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
    import tfscale
    from tests.strategy.restless import make_restless
    from tfscale.parallel import deal
    from tfscale.strategy.grid import weights

    if os.environ["STRATEGY"] == "tensorflow":
        return tfscale.ScaleStrategy(backend="tensorflow", deadline=DEADLINE)
    shard = {"sharded": "optimizer", "all": "all"}.get(os.environ["STRATEGY"])
    if shard == "all":
        deal.SMALL = 1  # the models of the tests are small
    more = {}
    if os.environ["STRATEGY"] == "rounded":
        shard, wire = "optimizer", tfscale.compression.WirePolicy("bf16", small=0)
        more = {"weights_wire": wire}
    if os.environ["STRATEGY"] == "shares":
        more = {"shares": [3] + [1] * (WORKERS * DEVICES - 1)}
    if os.environ["STRATEGY"] == "measured":
        make_restless()
        more = {"shares": "auto"}
    if os.environ["STRATEGY"] == "grid":
        weights.SlicesByRules.layout = first_axis
        weights.SlicesByRules.check = lambda self, model: None
        more = {"grid": tfscale.Grid(tensor=2), "tensor": {".": "columns"}}
    return tfscale.ScaleStrategy(
        algorithm, wire="fp32", deadline=DEADLINE, backend="engine", shard=shard, **more
    )


def first_axis(slicing, layer, weight):
    """Cut weights of all layers, along the first axis that can be cut; layers read them whole."""
    from tfscale.parallel.layout import Repeated, Split

    shape, ranks = tuple(weight.shape), slicing.team.size
    axis = next((i for i, size in enumerate(shape) if size % ranks == 0), None)
    return None if axis is None else Repeated.of(Split(shape, ranks, axis), slicing._team_ranks)


def attempt(act, strategy, name):
    """Return the result of ``act`` for a case, or its error."""
    keras.backend.clear_session(free_memory=False)  # a full collection takes half a second
    try:
        return act(strategy, name) or {}
    except pytest.skip.Exception as skipped:
        return {"skipped": str(skipped)}
    except BaseException:
        return {"error": traceback.format_exc()}


def take(act, algorithm="auto"):
    """Take all CASES; ``act`` gets the strategy and a case's name."""
    keras.config.disable_traceback_filtering()
    make_devices()
    strategy = make_strategy(algorithm)
    for name in os.environ["CASES"].split(","):
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        start = time.monotonic()
        record = attempt(act, strategy, name)
        faulthandler.cancel_dump_traceback_later()
        record |= {"case": name, "seconds": time.monotonic() - start}
        print("\nCASE", json.dumps(record), flush=True)
        if "error" in record and WORKERS > 1:
            os._exit(1)  # the workers may be out of step: the rest starts afresh
    leave(os.environ["MEETING"], "worker", ME, WORKERS)
