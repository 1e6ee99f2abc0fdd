"""Collective ops: all-reduce, reduce-scatter, all-gather, broadcast, mix.

All ops take a communicator and run on its device. They may overlap with each other and with
computation, and have gradients. Every rank must call them with the same arguments (except ``x``).
If ranks disagree, all ranks raise an error that says which ranks differ in what.
"""

from __future__ import annotations

import collections as containers
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale import collectives
from tfscale.collectives import Kind, Schedule, wires
from tfscale.collectives.proof import proven
from tfscale.collectives.registry import checked_algorithm
from tfscale.collectives.schedule import checked_schedule
from tfscale.native import library
from tfscale.native.bucket import BucketId, Name, bucket_id
from tfscale.native.group import Communicator
from tfscale.support import arguments

Algorithm = str | Callable[[int], Schedule] | Schedule

DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64)

# An op has its schedule's fingerprint as an attribute. With it, the op's gradient finds the
# all-reduce that the schedule is a half of, or the mixture.
_wholes: dict[str, Schedule] = {}


def all_reduce(
    x: Any,
    communicator: Communicator,
    *,
    schedule: Algorithm = "ring",
    wire: str = "fp32",
    reduction: str = "sum",
    residual: Any = None,
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    r"""Sum (or average) ``x`` over all ranks; all ranks get the same bits.

    With a residual :math:`e_r` on each rank :math:`r`, each call adds the rounding error of the
    last call, for every schedule and every wire:

    .. math:: \sum_r (x_r + e_r) = y + \sum_r e'_r

    Args:
        x: a tensor of one of ``DTYPES``, of the same shape on all ranks. Types of 16 bits are
            summed as float32.
        communicator: communicator of this rank, from a ``Group``.
        schedule: an algorithm's name, a function from ranks to a ``Schedule``, or a
            ``Schedule``.
        wire: format in which numbers are sent. ``"fp32"`` sends every type unchanged; the other
            formats are for floats.
        reduction: ``"sum"`` or ``"mean"``.
        residual: ``new_residual`` of the last call, float32 of x's shape (zeros at first).
        stochastic: whether to round at random, without bias; by default only for ``"ternary"``
            without a residual. (With a residual, random rounding would make residuals grow
            forever.)
        seed: integer seed of random rounding; pass a different seed in each step.
        piece_bytes: size of a message; 0 lets the engine choose.
        name: name of the bucket, the same on all ranks: a label, or a ``BucketId``.

    Returns:
        The sum, or ``(sum, new_residual)`` if a residual is given. A sum that is not
        finite leaves the residual unchanged.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def summed(communicator, x, lost):
        ...     return all_reduce(x, communicator, wire="int4", residual=lost)
        >>> (y, lost), _ = summed([tf.constant([1.0]), tf.constant([2.0])], [tf.zeros([1])] * 2)
        >>> print(y.numpy())
        [3.]
    """
    x = checked_tensor(x, communicator)
    made = resolved(checked_algorithm(schedule, "schedule"), communicator.ranks)
    common = common_arguments(
        communicator, made, "all_reduce", wire, stochastic, seed, piece_bytes, name, residual
    )
    y, kept = run_op("all_reduce", **summands(x, reduction, residual), **common)
    return y if residual is None else (y, kept[0])


def reduce_scatter(
    x: Any,
    communicator: Communicator,
    *,
    schedule: Algorithm = "ring",
    wire: str = "fp32",
    reduction: str = "sum",
    residual: Any = None,
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    """Sum ``x`` over all ranks and leave each rank its share of the rows.

    Rank r of P gets rows ``[r n / P, (r + 1) n / P)`` of the n rows of x; n must be a
    multiple of P. The schedule must give chunk r to rank r: ring, direct, or halving
    with a power of two of ranks. A rank does not round its own share.

    Args and returns: see ``all_reduce``.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def shared(communicator, x):
        ...     return reduce_scatter(x, communicator)
        >>> first, second = shared([tf.constant([1.0, 2.0]), tf.constant([10.0, 20.0])])
        >>> print(first.numpy(), second.numpy())
        [11.] [22.]
    """
    x = checked_tensor(x, communicator, has_rows=True)
    half = _half(checked_algorithm(schedule, "schedule"), communicator.ranks, "reduce_scatter")
    common = common_arguments(
        communicator, half, "reduce_scatter", wire, stochastic, seed, piece_bytes, name, residual
    )
    y, kept = run_op("reduce_scatter", **summands(x, reduction, residual), **common)
    return y if residual is None else (y, kept[0])


def all_gather(
    x: Any,
    communicator: Communicator,
    *,
    schedule: Algorithm = "ring",
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    """Join the rows of all ranks' ``x``, in rank order; shapes must be equal.

    Args: see ``all_reduce``. The schedule must give chunk r to rank r.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def joined(communicator, x):
        ...     return all_gather(x, communicator)
        >>> first, second = joined([tf.constant([1.0]), tf.constant([2.0])])
        >>> print(first.numpy(), second.numpy())
        [1. 2.] [1. 2.]
    """
    x = checked_tensor(x, communicator, has_rows=True)
    half = _half(checked_algorithm(schedule, "schedule"), communicator.ranks, "all_gather")
    return run_op(
        "all_gather",
        x=x,
        **common_arguments(
            communicator, half, "all_gather", wire, stochastic, seed, piece_bytes, name
        ),
    )


def broadcast(
    x: Any,
    communicator: Communicator,
    *,
    root: int = 0,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    """Give the root's ``x`` to all ranks.

    Args:
        root: rank whose numbers are sent; the ``x`` of other ranks gives only shape and type.
        others: see ``all_reduce``.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> @group.function
        ... def given(communicator, x):
        ...     return broadcast(x, communicator, root=1)
        >>> first, second = given([tf.constant([1.0]), tf.constant([2.0])])
        >>> print(first.numpy(), second.numpy())
        [2.] [2.]
    """
    x = checked_tensor(x, communicator)
    made = _broadcast(communicator.ranks, arguments.whole(root, "root", 0))
    return run_op(
        "broadcast",
        x=x,
        **common_arguments(
            communicator, made, "broadcast", wire, stochastic, seed, piece_bytes, name
        ),
    )


def mix(
    x: Any,
    communicator: Communicator,
    *,
    schedule: Schedule,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    r"""Mix ``x`` with the ``x`` of a few other ranks; each rank gets its own result.

    With :math:`S_r` the ranks that send to rank r, :math:`d_s` the number of ranks to which rank s
    sends, and :math:`z_s = x_s / (d_s + 1)`, the result is

    .. math:: y_r = z_r + \sum_{s \in S_r} Q(z_s) + d_r (z_r - Q(z_r))

    where Q rounds to the wire. A rank keeps the rounding errors of what it sends, so the sum over
    all ranks stays the same.

    Args:
        x: a tensor of floats. Types of 16 bits are mixed as float32; float64 needs the wire
            ``"fp32"``.
        schedule: a ``mixture`` of ``tfscale.collectives``.
        others: see ``all_reduce``.

    Example:
        >>> from tfscale.collectives import mixture
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> half = mixture("half of the first", 2, [(0, 1)])
        >>> @group.function
        ... def mixed(communicator, x):
        ...     return mix(x, communicator, schedule=half)
        >>> first, second = mixed([tf.constant([1.0]), tf.constant([10.0])])
        >>> print(first.numpy(), second.numpy())
        [0.5] [10.5]
    """
    x = checked_tensor(x, communicator)
    if not x.dtype.is_floating:
        advice = f"Shares of {x.dtype.name} are not whole: cast it first"
        raise arguments.wrong(x, "x", "a tensor of floats", advice)
    made = _mixture(checked_schedule(schedule))
    part = collectives.share(made, communicator.rank)
    wide = tf.cast(x, tf.float32) if x.dtype.size == 2 else x
    # Do not multiply by 1 / 3: its rounding error would be the same each time, a bias.
    own = wide / tf.constant(part.denominator, wide.dtype)
    common = common_arguments(communicator, made, "mix", wire, stochastic, seed, piece_bytes, name)
    return tf.cast(run_op("mix", x=own, **common), x.dtype)


def summands(x: tf.Tensor, reduction: str = "sum", residual: Any = None) -> dict[str, Any]:
    """Return what an op sums, checked, as its arguments."""
    return {
        "reduction": arguments.choice(reduction, "reduction", ("sum", "mean")),
        "residual": checked_residual(residual, x),
        "x": x,
    }


def run_op(op: str, **arguments: Any) -> Any:
    """Run a collective; in a graph nothing needs to use its result."""
    outputs = getattr(library.load(), f"tfscale_{op}")(**arguments)
    if not tf.executing_eagerly():
        # TensorFlow believes that the op only reads its resource (see library.py), and drops reads
        # that nothing consumes. Consume it, since the other ranks wait for it.
        tf.identity(tf.nest.flatten(outputs)[0])
    return outputs


def checked_tensor(
    x: Any,
    communicator: Communicator,
    has_rows: bool = False,
    dtypes: Sequence[tf.DType] = DTYPES,
) -> tf.Tensor:
    """Return ``x`` as a tensor of one of these types, or raise ``ValueError``."""
    checked_communicator(communicator)
    found = as_tensor(x, "x")
    if found.dtype not in dtypes:
        known = ", ".join(dtype.name for dtype in dtypes)
        raise arguments.wrong(x, "x", f"a tensor of {known}", f"Cast {found.dtype.name} first")
    if has_rows and found.shape.rank == 0:
        raise arguments.wrong(x, "x", "a tensor of at least one dimension")
    return found


def checked_communicator(communicator: Any) -> Communicator:
    """Return ``communicator`` if it is a ``Communicator``, else raise ``ValueError``."""
    expected = "one of the communicators of a tfscale.ops.Group"
    return arguments.instance(communicator, "communicator", Communicator, expected)


def as_tensor(x: Any, name: str) -> tf.Tensor:
    """Return an argument as a tensor."""
    try:
        return tf.convert_to_tensor(x)
    except (TypeError, ValueError) as error:
        raise arguments.wrong(x, name, "a tensor, or what TensorFlow makes one of") from error


def checked_residual(residual: Any, x: tf.Tensor) -> list[tf.Tensor]:
    """Return a list of the residual for ``x``; the list is empty if ``residual`` is None."""
    if residual is None:
        return []
    found = as_tensor(residual, "residual")
    if found.dtype != tf.float32 or not found.shape.is_compatible_with(x.shape):
        raise arguments.wrong(residual, "residual", f"a float32 tensor of x's shape, {x.shape}")
    return [found]


def common_arguments(
    communicator: Communicator,
    schedule: Schedule,
    op: str,
    wire: str,
    stochastic: bool | None,
    seed: Any,
    piece_bytes: int,
    name: Name | None,
    residual: Any = None,
) -> dict[str, Any]:
    wire = wires.checked(wire)
    arguments.optional(arguments.flag, stochastic, "stochastic")
    piece_bytes = arguments.whole(piece_bytes, "piece_bytes", 0, what="a number of bytes")
    bucket = checked_bucket(name, communicator, op)
    if not tf.is_tensor(seed):
        seed = arguments.whole(seed, "seed", what="a whole number, or a tensor of one")
    at_random = wires.FORMATS[wire].rounds_at_random(with_residual=residual is not None)
    return {
        "communicator": communicator.handle,
        "seed": tf.cast(seed, tf.int64) if tf.is_tensor(seed) else tf.constant(seed, tf.int64),
        **_bucket_attributes(bucket),
        "wire": wire,
        "stochastic": at_random if stochastic is None else stochastic,
        "piece_bytes": piece_bytes,
        **_schedule_attributes(schedule, communicator.rank),
    }


def checked_bucket(name: Name | None, communicator: Communicator, op: str) -> BucketId:
    """Return the bucket of this name, or a new one of the op's, or raise ``ValueError``."""
    if not isinstance(name, BucketId):
        arguments.optional(arguments.text, name, "name", "a text or a BucketId")
    return bucket_id(name) if name else communicator.new_bucket(op)


def _bucket_attributes(bucket: BucketId) -> dict[str, Any]:
    return {
        "bucket": bucket.label,
        "bucket_owner": bucket.owner,
        "bucket_graph": bucket.graph,
        "bucket_number": bucket.number,
    }


def _bucket_of(op: tf.Operation) -> BucketId:
    label, owner, graph = (
        op.get_attr(name).decode() for name in ("bucket", "bucket_owner", "bucket_graph")
    )
    return BucketId(label, owner, graph, op.get_attr("bucket_number"))


def _schedule_attributes(schedule: Schedule, rank: int) -> dict[str, Any]:
    return {
        "schedule": _fingerprint(schedule),
        "ranks": schedule.ranks,
        "rank": rank,
        "chunks": schedule.chunks,
        "program": list(_flat_program(schedule, rank)),
    }


# Every trace asks for the same schedule. The cache returns the same object, so the caches of its
# fingerprint and its programs apply, too.
@functools.lru_cache(maxsize=256)
def resolved(algorithm: Algorithm, ranks: int) -> Schedule:
    return collectives.resolve(algorithm, ranks)


@functools.lru_cache(maxsize=256)
def _half(algorithm: Algorithm, ranks: int, goal: str) -> Schedule:
    whole = resolved(algorithm, ranks)
    halve = collectives.reduce_scatter if goal == "reduce_scatter" else collectives.all_gather
    half = halve(whole)
    _wholes[_fingerprint(half)] = whole
    return half


@functools.lru_cache(maxsize=256)
def _mixture(schedule: Schedule) -> Schedule:
    if schedule.goal != "mixture":
        raise arguments.wrong(schedule, "schedule", "a mixture of tfscale.collectives")
    made = proven(lambda: schedule, schedule)
    _wholes[_fingerprint(made)] = made
    return made


_broadcast = functools.lru_cache(maxsize=256)(collectives.broadcast)


@functools.lru_cache(maxsize=256)
def _fingerprint(schedule: Schedule) -> str:
    return schedule.fingerprint()


@functools.lru_cache(maxsize=1024)
def _flat_program(schedule: Schedule, rank: int) -> tuple[int, ...]:
    return tuple(int(number) for move in schedule.program(rank) for number in move)


# ---------------------------------------------------------------------------
# Gradients. Each gradient is the collective that sends every number back to where it came from.


# Number of gradients of a bucket in a graph: there are several if two losses share an op.
_taken: weakref.WeakKeyDictionary[Any, containers.Counter[str]] = weakref.WeakKeyDictionary()


def _gradient_bucket(op: tf.Operation) -> BucketId:
    bucket = _bucket_of(op)
    label = f"gradient of {bucket._replace(graph='')}"
    gradient = BucketId(label, graph=bucket.graph)
    if tf.executing_eagerly():  # eager ops run one after the other
        return gradient
    taken = _taken.setdefault(tf.compat.v1.get_default_graph(), containers.Counter())
    key = f"{op.inputs[0].name} {gradient}"  # each rank counts for itself
    taken[key] += 1
    return gradient._replace(number=taken[key])


def shared_with_gradient(op: tf.Operation) -> dict[str, Any]:
    """Return the arguments that a gradient shares with its op."""
    return {
        "communicator": op.inputs[0],
        "seed": op.inputs[2],
        **_bucket_attributes(_gradient_bucket(op)),
        "wire": op.get_attr("wire").decode(),
        "stochastic": op.get_attr("stochastic"),
        "piece_bytes": op.get_attr("piece_bytes"),
    }


def same_schedule(op: tf.Operation) -> dict[str, Any]:
    """Return the arguments that say which schedule an op runs."""
    names = ("schedule", "ranks", "rank", "chunks", "program")
    attributes = {name: op.get_attr(name) for name in names}
    attributes["schedule"] = attributes["schedule"].decode()
    return attributes


def _other_half(op: tf.Operation, goal: str) -> dict[str, Any]:
    whole = _wholes[op.get_attr("schedule").decode()]
    return _schedule_attributes(_half(whole, whole.ranks, goal), op.get_attr("rank"))


def _inputs_without_gradient(op: tf.Operation) -> list[None]:
    return [None] * (len(op.inputs) - 2)


@tf.RegisterGradient("TfscaleAllReduce")
def _all_reduce_gradient(op: tf.Operation, dy: tf.Tensor, *_: tf.Tensor) -> list[Any]:
    common = {**shared_with_gradient(op), **same_schedule(op)}
    reduction = op.get_attr("reduction").decode()
    dx, _ = run_op("all_reduce", **summands(dy, reduction), **common)
    return [None, dx, *_inputs_without_gradient(op)]


@tf.RegisterGradient("TfscaleReduceScatter")
def _reduce_scatter_gradient(op: tf.Operation, dy: tf.Tensor, *_: tf.Tensor) -> list[Any]:
    dx = run_op("all_gather", x=dy, **shared_with_gradient(op), **_other_half(op, "all_gather"))
    if op.get_attr("reduction") == b"mean":
        dx /= tf.cast(op.get_attr("ranks"), dx.dtype)
    return [None, dx, *_inputs_without_gradient(op)]


@tf.RegisterGradient("TfscaleAllGather")
def _all_gather_gradient(op: tf.Operation, dy: tf.Tensor) -> list[Any]:
    common = {**shared_with_gradient(op), **_other_half(op, "reduce_scatter")}
    dx, _ = run_op("reduce_scatter", **summands(dy), **common)
    return [None, dx, *_inputs_without_gradient(op)]


@tf.RegisterGradient("TfscaleBroadcast")
def _broadcast_gradient(op: tf.Operation, dy: tf.Tensor) -> list[Any]:
    ranks, rank = op.get_attr("ranks"), op.get_attr("rank")
    common = {**shared_with_gradient(op), **_schedule_attributes(resolved("ring", ranks), rank)}
    dx, _ = run_op("all_reduce", **summands(dy), **common)
    is_root = Kind.FINALISE in op.get_attr("program")[::4]
    return [None, dx if is_root else tf.zeros_like(dx), *_inputs_without_gradient(op)]


@tf.RegisterGradient("TfscaleMix")
def _mix_gradient(op: tf.Operation, dy: tf.Tensor) -> list[Any]:
    back = _backwards(_wholes[op.get_attr("schedule").decode()])
    dx = run_op(
        "mix", x=dy, **shared_with_gradient(op), **_schedule_attributes(back, op.get_attr("rank"))
    )
    return [None, dx, *_inputs_without_gradient(op)]


@functools.lru_cache(maxsize=256)
def _backwards(mixture: Schedule) -> Schedule:
    """Return the mixture in which receivers send to senders."""
    pairs = [
        (move.peer, rank)
        for rank in range(mixture.ranks)
        for move in mixture.program(rank)
        if move.kind is Kind.SEND
    ]
    made = collectives.mixture(f"{mixture.name} backwards", mixture.ranks, pairs)
    return _mixture(made)
