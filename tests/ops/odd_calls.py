"""Calls our ops with odd arguments, one after the other: ``odd_calls.py COUNT``.

Says what it is about to call, since nobody could say so once a call has ended the process. Whatever
is not among the arguments of an op's calls in ``raw_calls`` is drawn: shapes that no memory
could hold or that hold nothing, NaN, negative places, handles of something else, attributes far
out; through eager calls, functions, ``tf.data`` and sessions.
"""

import math
import random
import sys
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tests.ops import raw_calls
from tfscale.native import library
from tfscale.ops import Group, all_gather, all_reduce, mix, reduce_scatter

HUGE, FAR = 2**40, 2**62
SIZES = (0, 1, 2, 3, HUGE, FAR)
NUMBERS = (0.0, 1.0, -1.0, math.nan, math.inf, 1e-42, 3e38)
INTEGERS = (0, 1, 2, 3, -1, -2, 2**31 - 1, -(2**31), 2**31, HUGE, FAR, 2**63 - 1, -(2**63))
TEXTS = ("", "ring", "fp32", "int8", "sign", "bf16", "mean", "sockets", "x" * 5000, "\0", "é")
DEVICE = "/job:localhost/replica:0/task:0/device:CPU:0"
SHAPES = (None, [], [0], [HUGE, 0], [None], [FAR], [2], [HUGE, HUGE])
MOST = 64  # numbers that a tensor really has
ATTRIBUTES = {
    "int": lambda draw: draw.choice(INTEGERS),
    "string": lambda draw: draw.choice(TEXTS),
    "bool": lambda draw: draw.random() < 0.5,
    "list(int)": lambda draw: draw.choices((0, 1, 2, -1, 2**31 - 1), k=draw.choice((0, 4, 5, 8))),
    "list(string)": lambda draw: draw.choices(("", "a", DEVICE), k=draw.choice((0, 1, 2, 3))),
    "shape": lambda draw: draw.choice(SHAPES),
    "list(type)": lambda draw: [tf.float32] * draw.choice((0, 1, 2)),
    "type": lambda draw: draw.choice((tf.float32, tf.int32, tf.string)),
}


def fits(*sizes):
    return math.prod(sizes) <= MOST


def tensor(draw, dtype):
    """A tensor whose shape is odd, full of one odd value."""
    while True:
        shape = draw.choices(SIZES, k=draw.choice((0, 1, 1, 2, 2, 3)))
        if not fits(*shape) or math.prod(size or 1 for size in shape) >= 2**63:
            continue
        if dtype == tf.string:
            value = draw.choice(TEXTS)
        elif dtype == tf.bool:
            value = draw.random() < 0.7
        elif dtype.is_integer:
            value = draw.choice((0, 1, -1, dtype.max, dtype.min))
        else:
            value = draw.choice(NUMBERS)
        return tf.fill(shape, tf.constant(value, dtype))


def handles(draw, groups):
    """A handle of whatever: ours and others', of what is not there any more, none, several."""
    made = [group.communicators[-1].handle for group in groups]
    pair = tf.raw_ops.Pack(values=made[:1] * 2)
    return draw.choice(
        (
            *made,
            pair,
            pair[:0],
            library.load().tfscale_flight(),
            tf.Variable(tensor(draw, tf.float32)).handle,
            tf.Variable(tensor(draw, tf.int32)).handle,
            raw_calls.variable(0, HUGE),
            raw_calls.variable(HUGE, 0),
            tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="nobody's"),
            tf.raw_ops.MutableHashTableV2(key_dtype=tf.int64, value_dtype=tf.int64),
        )
    )


def matching(draw, op):
    """Arguments whose shapes agree, though they are odd; nothing for most ops."""
    sizes = draw.choice(((0, HUGE), (0, 1, HUGE), (0, 2, FAR), (0, 1, 2, 3), (0, HUGE, FAR)))
    rows, columns, rank = draw.choices(sizes, k=3)
    if not (fits(rows, columns) and fits(rows, rank) and fits(rank, columns)):
        return {}
    x, basis, factor = tf.ones([rows, columns]), tf.ones([rows, rank]), tf.ones([rank, columns])
    residual = raw_calls.variable(rows, columns)
    if op == "low_rank_rows":
        return {"residual": residual, "x": x, "factor": factor}
    if op == "low_rank_columns":
        return {"residual": residual, "x": x, "basis": basis}
    if op == "low_rank_sum":
        return {"residual": residual, "x": x, "basis": basis, "own": factor, "total": factor}
    if op == "largest":
        return {"residual": [residual], "x": x, "count": draw.choice((0, rows * columns))}
    if op == "sum_at":
        return {"residual": residual, "x": x}
    if op in ("lamb", "lars"):
        names = ("var", "m", "v") if op == "lamb" else ("var", "momentum")
        return {"grad": x, **{name: raw_calls.variable(rows, columns) for name in names}}
    return {"x": x} if op in raw_calls.PROGRAMS else {}


def definition(op):
    return op_def_registry.get("Tfscale" + op.title().replace("_", ""))


def drawn(draw, op, groups) -> dict[str, Any]:
    """Arguments of an op, a few of them odd."""
    given = {**raw_calls.arguments(op), **(matching(draw, op) if draw.random() < 0.5 else {})}
    defined = definition(op)
    choices = [*defined.input_arg, *(a for a in defined.attr if a.name not in ("T", "feedback"))]
    for one in draw.sample(choices, min(draw.choice((0, 1, 1, 2, 3)), len(choices))):
        if one in defined.attr:
            given[one.name] = ATTRIBUTES[one.type](draw)
            continue
        dtype = tf.as_dtype(one.type) if one.type else draw.choice((tf.float32, tf.int32, tf.half))

        def value(dtype=dtype):
            return handles(draw, groups) if dtype == tf.resource else tensor(draw, dtype)

        several = one.number_attr
        given[one.name] = [value() for _ in range(draw.choice((0, 1, 2)))] if several else value()
    return given


def eagerly(op, given):
    raw_calls.run(op, given)


def in_function(op, given):
    tf.function(lambda: raw_calls.run(op, given), autograph=False)()


def in_dataset(op, given):
    def step(i):
        raw_calls.run(op, given)
        return i

    list(tf.data.Dataset.range(1).map(step))


WAYS = (eagerly, eagerly, eagerly, in_function, in_dataset, raw_calls.run_in_session)


def together(draw, groups):
    """A collective that both ranks run, with the same odd arguments."""
    rows, columns = draw.choice(((0, 2), (2, 0), (HUGE, 0), (FAR, 0), (2, 3), (4, 1), (1, 1)))
    x = tf.fill([rows, columns], draw.choice(NUMBERS))
    wire, pieces = draw.choice(TEXTS[2:6]), draw.choice(INTEGERS)
    seed = draw.choice((0, -1, 2**63 - 1))
    run = draw.choice((all_reduce, all_gather, reduce_scatter, mix))
    print("together", run.__name__, [rows, columns], wire, pieces, seed, flush=True)
    given = {"wire": wire, "piece_bytes": pieces, "seed": seed}
    groups[-1].function(lambda c, y: run(y, c, **given))([x, x])


def described(value):
    if isinstance(value, list):
        return [described(one) for one in value]
    if not tf.is_tensor(value):
        return value
    first = "" if value.dtype == tf.resource else tf.reshape(value, [-1])[:1].numpy()
    return f"{value.dtype.name}{value.shape}{first}"


def attempt(call):
    try:
        call()
    except (tf.errors.OpError, ValueError, TypeError, OverflowError) as error:
        return type(error).__name__
    return "done"


def main(count):
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    lone, waiting, joined = (
        Group.local([f"CPU:{i}" for i in range(ranks)], deadline=deadline)
        for ranks, deadline in ((1, 1.0), (2, 0.05), (2, 60.0))
    )
    raw_calls.group = lambda ranks: waiting  # whose other rank never comes
    outcomes: dict[str, int] = {}
    for number in range(count):
        draw = random.Random(number)
        if draw.random() < 0.1:
            outcome = attempt(lambda draw=draw: together(draw, [lone, waiting, joined]))
        else:
            op, way = draw.choice(raw_calls.OPS), draw.choice(WAYS)
            given = drawn(draw, op, [lone, waiting, joined])
            print(number, way.__name__, op, {n: described(v) for n, v in given.items()}, flush=True)
            outcome = attempt(lambda op=op, way=way, given=given: way(op, given))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    print("ALL", count, outcomes, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
