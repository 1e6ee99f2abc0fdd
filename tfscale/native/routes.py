"""Routes: ops that bring each number to one rank, and add nothing."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfscale import collectives
from tfscale.collectives import Schedule
from tfscale.collectives.route import places
from tfscale.native.bucket import Name, bucket_id
from tfscale.native.collective import (
    as_tensor,
    checked_communicator,
    checked_tensor,
    common_arguments,
    run_op,
    same_schedule,
    shared_with_gradient,
)
from tfscale.native.group import Communicator, belongs_to_its_outer
from tfscale.support import arguments

# Numbers are sent as they are, so there are more types than those that can be summed.
ROUTED_DTYPES = (
    tf.float32,
    tf.float16,
    tf.bfloat16,
    tf.float64,
    tf.int32,
    tf.int64,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.uint16,
    tf.uint32,
    tf.uint64,
    tf.bool,
)


def transfer(
    x: Any,
    communicator: Communicator,
    *,
    source: int,
    target: int,
    gradient: bool = False,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> tf.Tensor:
    """Give the source's ``x`` to the target; only these two ranks call this.

    The ranks of the group must have met before, by another collective or ``Group.join``. Two ranks
    find each other by the transfer's name, so give each transfer a name of its own.

    Args:
        x: on the source, a tensor of one of ``ROUTED_DTYPES``; on the target, a tensor of the same
            shape and type, whose numbers do not matter, or a ``tf.TensorSpec`` of a known shape.
        communicator: communicator of this rank, from a ``Group``.
        source: rank that sends.
        target: rank that receives.
        gradient: whether the target's gradient goes back to the source. Then both ranks must ask
            for the gradient with respect to the ``x`` that they passed, else one waits for the
            other. By default the result is a constant on the target.
        wire: format in which numbers are sent. ``"fp32"`` sends every type unchanged; the other
            formats are for floats.
        stochastic: see ``all_reduce``.
        seed: see ``all_reduce``.
        piece_bytes: see ``all_reduce``.
        name: name of the transfer in errors, such as ``"activation 0 to 1, microbatch 3"``.

    Returns:
        The source's ``x``; on the source, ``x`` itself.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def given(communicator, x):
        ...     return transfer(x, communicator, source=0, target=1, name="activation")
        >>> first, second = given([tf.constant([1.0]), tf.constant([2.0])])
        >>> print(first.numpy(), second.numpy())
        [1.] [1.]
    """
    rank = checked_communicator(communicator).rank
    made = _transfer(communicator.ranks, source, target)
    if rank not in (source, target):
        expected = f"the communicator of rank {source} or of rank {target}"
        advice = "Other ranks have no part in this transfer: they must not call it"
        raise arguments.wrong(communicator, "communicator", expected, advice)
    arguments.flag(gradient, "gradient")
    sends = rank == source
    if sends or not isinstance(x, tf.TensorSpec):
        x = checked_tensor(x, communicator, dtypes=ROUTED_DTYPES)
    else:
        x = _placeholder(x)
    bucket = bucket_id(name) if name else communicator.new_bucket("transfer")
    sending = {"wire": wire, "stochastic": stochastic, "seed": seed, "piece_bytes": piece_bytes}
    common = common_arguments(communicator, made, "transfer", name=bucket, **sending)
    common.update(_places(made, rank))

    def move(x: tf.Tensor) -> tf.Tensor:
        return _send(x, common) if sends else _receive(x, common)

    if not gradient:
        return move(x) if sends else tf.stop_gradient(move(tf.stop_gradient(x)))

    @tf.custom_gradient
    def moved(x: tf.Tensor) -> Any:
        def back(dy: tf.Tensor) -> tf.Tensor:
            label = communicator.new_bucket(f"gradient of {bucket._replace(graph='')}")
            came = transfer(dy, communicator, source=target, target=source, name=label, **sending)
            return dy + came if sends else tf.zeros_like(dy)

        return move(x), back

    return moved(x)


def all_to_all(
    x: Any,
    communicator: Communicator,
    *,
    sizes: Any = None,
    received: Any = None,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    """Give each rank its rows of each rank's ``x``, in the order of ranks.

    By default rank r gets rows ``[r n / P, (r + 1) n / P)`` of the n rows of each rank's x; n must
    be a multiple of P, and the same on all ranks. With ``sizes``, rank r gets the next ``sizes[r]``
    rows, and each rank has sizes of its own, which may be 0.

    Args:
        x: a tensor of one of ``ROUTED_DTYPES``, with rows.
        communicator: communicator of this rank, from a ``Group``.
        sizes: number of rows for each rank.
        received: number of rows from each rank, if this rank knows them; else the ranks first
            tell each other. Either all ranks pass it or none.
        wire: format in which numbers are sent; what a rank keeps for itself is not rounded.
        stochastic: see ``all_reduce``.
        seed: see ``all_reduce``.
        piece_bytes: see ``all_reduce``.
        name: see ``all_reduce``.

    Returns:
        The rows for this rank; with ``sizes``, the rows and the number of rows from each rank.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def exchanged(communicator, x, sizes):
        ...     return all_to_all(x, communicator, sizes=sizes)
        >>> x = [tf.constant([1.0, 2.0]), tf.constant([3.0])]
        >>> (first, _), (second, counts) = exchanged(x, [tf.constant([0, 2]), tf.constant([1, 0])])
        >>> print(first.numpy(), second.numpy(), counts.numpy())
        [3.] [1. 2.] [2 0]
    """
    x = checked_tensor(x, communicator, has_rows=True, dtypes=ROUTED_DTYPES)
    ranks = communicator.ranks
    made = _all_to_all(ranks)
    bucket = bucket_id(name) if name else communicator.new_bucket("all_to_all")
    common = common_arguments(
        communicator, made, "all_to_all", wire, stochastic, seed, piece_bytes, bucket
    )
    common.update(_places(made, communicator.rank))
    if sizes is None:
        if received is not None:
            raise arguments.wrong(received, "received", "None, since there are no sizes")
        share = _share(x, ranks)
        return run_op("route", x=x, brought=share, got=share, **common)
    sizes = _checked_sizes(sizes, "sizes", ranks)
    if received is None:
        counting = bucket._replace(label=f"{bucket.label}: rows")
        received = all_to_all(sizes, communicator, name=counting)
    else:
        received = _checked_sizes(received, "received", ranks)
    brought, got = tf.cast(sizes, tf.int64), tf.cast(received, tf.int64)
    return run_op("route", x=x, brought=brought, got=got, ragged=True, **common), received


def _send(x: tf.Tensor, common: dict[str, Any]) -> tf.Tensor:
    rows = x if x.shape.rank != 0 else x[None]
    nothing = tf.zeros([0], tf.int64)
    brought = tf.shape(rows, tf.int64)[:1]
    detached = _holds_up_others()
    rows = tf.stop_gradient(rows)
    run_op("route", x=rows, brought=brought, got=nothing, detached=detached, **common)
    return tf.identity(x)


def _holds_up_others() -> bool:
    """Return whether what comes after an op would wait for the op, though it needs no result.

    In a function nothing does, and the function ends when all its ops have ended. Eager ops run one
    after the other, an iteration of a loop begins when all ops of the last one have ended, and a
    branch gives its result when all its ops have ended.
    """
    return tf.executing_eagerly() or belongs_to_its_outer(tf.compat.v1.get_default_graph())


def _receive(x: tf.Tensor, common: dict[str, Any]) -> tf.Tensor:
    """Return what comes, in the shape of ``x``."""
    shape = tf.shape(x, tf.int64) if x.shape.rank != 0 else tf.ones([1], tf.int64)
    empty = tf.zeros(tf.concat([[0], shape[1:]], 0), x.dtype)
    nothing = tf.zeros([0], tf.int64)
    y = run_op("route", x=empty, brought=nothing, got=shape[:1], **common)
    return tf.ensure_shape(y, x.shape) if x.shape.rank != 0 else y[0]


def _placeholder(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype not in ROUTED_DTYPES or not spec.shape.is_fully_defined():
        advice = "Pass a tensor of the shape instead, if it is unknown until the step runs"
        raise arguments.wrong(spec, "x", "a TensorSpec of a known shape, of numbers", advice)
    return tf.zeros(spec.shape, spec.dtype)


def _share(x: tf.Tensor, ranks: int) -> tf.Tensor:
    rows = x.shape[0]
    if rows is None:
        rows = tf.shape(x, tf.int64)[0]
        # A remainder is refused by the op: sizes then do not add up to the rows.
        return tf.repeat(rows // ranks, ranks)
    if rows % ranks:
        expected = f"a tensor whose number of rows is a multiple of the {ranks} ranks"
        raise arguments.wrong(x.shape, "x", expected, "Pad it, or pass sizes")
    return tf.constant([rows // ranks] * ranks, tf.int64)


def _checked_sizes(sizes: Any, name: str, ranks: int) -> tf.Tensor:
    found = as_tensor(sizes, name)
    if not found.dtype.is_integer or not found.shape.is_compatible_with([ranks]):
        raise arguments.wrong(sizes, name, f"{ranks} whole numbers of rows, one for each rank")
    return found if found.dtype in (tf.int32, tf.int64) else tf.cast(found, tf.int64)


@functools.lru_cache(maxsize=1024)
def _transfer(ranks: int, source: int, target: int) -> Schedule:
    return collectives.transfer(ranks, source, target)


@functools.lru_cache(maxsize=16)
def _all_to_all(ranks: int) -> Schedule:
    return collectives.all_to_all(ranks)


@functools.lru_cache(maxsize=1024)
def _places(schedule: Schedule, rank: int) -> dict[str, list[int]]:
    brings, gets = places(schedule, rank)
    return {"brings": list(brings), "gets": list(gets)}


@tf.RegisterGradient("TfscaleRoute")
def _route_gradient(op: tf.Operation, dy: tf.Tensor) -> list[Any]:
    """Send each number back to where it came from, by the same schedule.

    Only an all-to-all gets here; a transfer has no gradient, or one of its own.
    """
    *_, brought, got = op.inputs
    names = ("brings", "gets", "ragged")
    dx = run_op(
        "route",
        x=dy,
        brought=got,
        got=brought,
        **{name: op.get_attr(name) for name in names},
        **shared_with_gradient(op),
        **same_schedule(op),
    )
    return [None, dx, None, None, None]
