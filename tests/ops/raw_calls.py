"""Our ops as TensorFlow has them, without the checks of ``tfscale.ops``: each with arguments that
it takes, of which a test may change some.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from helpers import group

from tfscale.native import library
from tfscale.native.optimizers import lamb_numbers, lars_numbers

PAIR = 2
PROGRAMS = {  # of the first of two ranks: kind, peer, first chunk, end
    "all_reduce": [[0, 1, 0, 1], [3, 1, 0, 1]],
    "begin": [[0, 1, 0, 1], [3, 1, 0, 1]],
    "broadcast": [[2, -1, 0, 1], [0, 1, 0, 1]],
    "reduce_scatter": [[0, 1, 1, 2], [1, 1, 0, 1], [2, -1, 0, 1]],
    "all_gather": [[2, -1, 0, 1], [0, 1, 0, 1], [3, 1, 1, 2]],
    "mix": [[0, 1, 0, 1], [1, 1, 0, 1], [2, -1, 0, 1]],
    "route": [[2, -1, 0, 2], [0, 1, 1, 2], [3, 1, 3, 4]],
}


def handle() -> tf.Tensor:
    """Return the communicator of the first of two ranks."""
    return group(PAIR).communicators[0].handle


def variable(*shape: int) -> tf.Tensor:
    """Return the handle of a variable of ones, which lives as long as its handle."""
    return tf.Variable(tf.ones(shape)).handle


def arguments(op: str) -> dict[str, Any]:
    """Return arguments that the op takes."""
    if op in PROGRAMS:
        return _of_collective(op)
    return {"communicator": handle()} if op in _OF_COMMUNICATOR else _ARGUMENTS[op]()


def run(op: str, given: dict[str, Any]) -> Any:
    """Run the op with these arguments and no others."""
    return getattr(library.load(), f"tfscale_{op}")(**given)


def run_in_session(op: str, given: dict[str, Any]) -> None:
    """Run the op in a ``Session``, with resources of its own for those that are given."""
    with tf.Graph().as_default() as graph:
        made = {
            "communicator": library.load().tfscale_communicator(**_of_communicator()),
            "flight": library.load().tfscale_flight(),
        }
        variable = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2])

        def of_graph(name, value):
            if isinstance(value, list):
                return [of_graph(name, one) for one in value]
            if not tf.is_tensor(value):
                return value
            return made.get(name, variable) if value.dtype == tf.resource else value.numpy()

        result = run(op, {name: of_graph(name, value) for name, value in given.items()})
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(result)


def call(op: str, **changed: Any) -> Any:
    """Run the op with other values for some arguments."""
    return run(op, {**arguments(op), **changed})


def _of_collective(op: str) -> dict[str, Any]:
    given = {
        "communicator": handle(),
        "x": tf.constant([1.0, 2.0]),
        "seed": np.int64(0),
        "bucket": "inputs",
        "schedule": "inputs",
        "ranks": PAIR,
        "rank": 0,
        "chunks": max(last for *_, last in PROGRAMS[op]),
        "program": [number for move in PROGRAMS[op] for number in move],
    }
    if op in ("all_reduce", "reduce_scatter", "begin"):
        given["residual"] = []
    if op == "route":
        given.update(brings=[0, 1], gets=[0, 3], brought=np.int64([1, 1]), got=np.int64([1, 1]))
    if op == "begin":
        given["flight"] = library.load().tfscale_flight()
    return given


def _of_communicator() -> dict[str, Any]:
    devices = list(group(PAIR).communicators[0].devices)
    return {
        "group_key": 77,
        "rank": 0,
        "devices": devices,
        "peers": ["one", "other"],
        "deadline_ms": 100,
        "slow_after_ms": 0,
        "shared_name": "raw_calls",
    }


_OF_COMMUNICATOR = ("join", "totals", "ways", "watch")
_ARGUMENTS = {
    "communicator": _of_communicator,
    "give_up": lambda: {
        "communicator": handle(),
        "reason": "enough",
        "linger": tf.constant(0.1, tf.float64),
    },
    "executions": lambda: {"communicator": handle(), "most": np.int64(1)},
    "flight": dict,
    "drop": lambda: {"flight": library.load().tfscale_flight()},
    "in_flight": lambda: {"flight": library.load().tfscale_flight()},
    "take": lambda: {"flight": library.load().tfscale_flight(), "shape": [2], "lost_types": []},
    "largest": lambda: {"residual": [variable(3)], "x": tf.ones([3]), "count": 2},
    "sum_at": lambda: {
        "residual": variable(3),
        "x": tf.ones([3]),
        "places": [0],
        "kept": [1.0],
        "every_place": [0, 1],
        "every_number": [1.0, 2.0],
        "finite": True,
    },
    "low_rank_rows": lambda: {
        "residual": variable(3, 2),
        "x": tf.ones([3, 2]),
        "factor": tf.ones([1, 2]),
    },
    "low_rank_columns": lambda: {
        "residual": variable(3, 2),
        "x": tf.ones([3, 2]),
        "basis": tf.ones([3, 1]),
    },
    "low_rank_sum": lambda: {
        "residual": variable(3, 2),
        "x": tf.ones([3, 2]),
        "basis": tf.ones([3, 1]),
        "own": tf.ones([1, 2]),
        "total": tf.ones([1, 2]),
        "finite": True,
    },
    "best_classes": lambda: {"values": tf.ones([2, 1, 3]), "places": [[0, 3], [1, 4]], "k": 1},
    "lamb": lambda: {
        "var": variable(2),
        "m": variable(2),
        "v": variable(2),
        "grad": tf.ones([2]),
        "hyper": lamb_numbers(0.1),
    },
    "lars": lambda: {
        "var": variable(2),
        "momentum": variable(2),
        "grad": tf.ones([2]),
        "hyper": lars_numbers(0.1),
    },
}
OPS = tuple(sorted({*PROGRAMS, *_OF_COMMUNICATOR, *_ARGUMENTS}))
