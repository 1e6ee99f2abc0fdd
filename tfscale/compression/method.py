"""The base class of methods, which sum a bucket's gradients over all replicas.

A method gets the gradients of one replica, its state from earlier steps, and the exchange's
collectives; it returns the sums. It runs on all replicas at once, while a step is traced, and must
do the same on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfscale.collectives import wires
from tfscale.collectives.wires import FORMATS, LOSSLESS
from tfscale.compression.gradient import Gradient
from tfscale.native import Communicator
from tfscale.native.bucket import BucketId
from tfscale.support import arguments

RESIDUAL = "residual"  # the name of the state that was not sent yet


def _size(value: int, name: str) -> int:
    return arguments.whole(value, name, 0)


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that a method keeps for a variable between steps; it is saved with the optimizer.

    Args:
        shape: shape of the tensor, which is float32.
        common: whether it is equal on all replicas. Otherwise each replica has its own, and these
            are parts of a sum: a new number of replicas shares out the sum anew.
        start: makes the first value of that shape; zeros by default. It must be equal on all
            replicas.
    """

    shape: tuple[int, ...]
    common: bool = False
    start: Callable[[tuple[int, ...]], Any] = np.zeros

    def __post_init__(self) -> None:
        shape = arguments.items(self.shape, "shape", "a tensor's shape", _size, least=0)
        object.__setattr__(self, "shape", shape)
        arguments.flag(self.common, "common")
        arguments.function(self.start, "start", "a function from a shape to an array")


@dataclasses.dataclass(frozen=True, order=True)
class Price:
    """The cost of collectives, to be compared with other costs of the same load.

    Args:
        amount: the amount.
        unit: ``"seconds"`` by the cost model if links were measured, and otherwise ``"bytes"`` that
            the busiest replica sends.
    """

    amount: float
    unit: str

    def __str__(self) -> str:
        if self.unit == "seconds":
            return f"{1000 * self.amount:.3g} ms"
        return f"{self.amount:,.0f} bytes"


class Load(Protocol):
    """The gradients of one bucket on one replica, and the operations that a method may use.

    Attributes:
        gradients: this replica's gradients, float32, in the order of ``described``.
        described: descriptions of the gradients.
        replicas: number of replicas.
        rank: rank of this replica.
        on_cpu: whether this replica computes on a CPU.
        device: name of this replica's device.
        communicator: communicator of this replica, for the ops of ``tfscale.ops``.
        method: method that sums the bucket, or its variant.
        name: name of the bucket in the engine and its log.
        collectives: descriptions of the collectives that the method has asked for so far.
        changes: list to which one replica adds the changes of methods, for ``explain()``.
    """

    gradients: list[tf.Tensor]
    described: list[Gradient]
    replicas: int
    rank: int
    on_cpu: bool
    device: str
    communicator: Communicator
    method: Method
    name: BucketId
    collectives: list[Any]
    changes: list[Any]

    @property
    def step(self) -> tf.Tensor:
        """Number of updates that the optimizer has made, an int64."""

    def kept(self, name: str) -> list[tf.Tensor]:
        """Return the state of that name for each gradient."""

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """Keep values until the next step. A common state must be equal on all replicas."""

    def variables(self, name: str) -> list[tf.Variable]:
        """Return the variables of a state, for operations that change it in place."""

    def price(self, reduced: Sequence[int] = (), gathered: Sequence[int] = ()) -> Price:
        """Return the cost of collectives of these sizes; equal on all replicas.

        Args:
            reduced: bytes that each replica would give to each ``all_reduce``.
            gathered: bytes that each replica would give to each ``all_gather``.
        """

    def say(self, reason: str) -> None:
        """Record the reason for this kind of sum, for ``explain()``."""

    def all_reduce(
        self, x: tf.Tensor, wire: str = LOSSLESS, residual: tf.Tensor | None = None, what: str = ""
    ) -> Any:
        """Return the sum of x over all replicas; with a residual, ``(sum, new_residual)``.

        Args:
            x: a tensor, of one shape on all replicas.
            wire: the format in which x is sent.
            residual: the errors of earlier calls, of x's shape.
            what: name of the call in logs and timelines.
        """

    def all_gather(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """Return the rows of all replicas' x, in the order of their ranks; shapes must be equal."""

    def reduce_scatter(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """Return this replica's share of the rows of x's sum.

        The share is ``[r n / P, (r + 1) n / P)`` of n rows, which must be a multiple of P.
        """

    def draw_for_all_variants(self) -> None:
        """Draw one seed now, from which ``seed`` makes all others; for methods made of others."""

    def seed(self) -> tf.Tensor:
        """Return an int64, new at each call and in each step, equal on all replicas.

        Only methods with ``random`` may call this.
        """

    def within(self, variant: Method, number: int) -> Load:
        """Return this load for one of the methods that this one is made of, by its number."""

    def note(self, number: tf.Tensor) -> None:
        """Record the number of the method that sums the bucket in this step, for ``explain()``."""

    def shared(self, make: Callable[[Any, tuple[str, ...]], Any]) -> Any:
        """Return an object that all buckets of this class of methods share, in all steps.

        Args:
            make: makes the object of this replica in the first step, from this load and the names
                of the buckets, in the order of their sums.
        """

    def at_end(self, body: Callable[[], None]) -> None:
        """Call ``body`` after the last bucket of this step."""


class Method:
    """A way to sum a bucket's gradients over all replicas.

    To define your own method, write a frozen dataclass: methods that are equal share buckets.

    Attributes:
        random: whether the method needs seeds.
        lossless: whether its sums are exact, for every type.
        others: the methods that ``suited`` may return instead of this one.
        wires: the formats in which it sends.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Mean(Method):
        ...     def sums(self, load):
        ...         return [load.all_reduce(g, what=str(i)) for i, g in enumerate(load.gradients)]
    """

    random: bool = False
    lossless: bool = False
    others: tuple[Method, ...] = ()
    wires: tuple[str, ...] = (LOSSLESS,)

    def suited(self, gradient: Gradient) -> Method:
        """Return the method for a gradient: this one, or another where this one would not pay."""
        return self

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the state for a gradient, by names that are valid for variables in Python."""
        return {}

    def keeps_losses(self, gradient: Gradient) -> bool:
        """Return whether the residual of a gradient holds all that is not sent."""
        return self.lossless or RESIDUAL in self.state(gradient)

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Return the sums over all replicas, with the same bits on each; called during tracing."""
        raise NotImplementedError

    @property
    def rows_wire(self) -> str:
        """The format for a gradient of which only some rows are sent: the first of ``wires``."""
        return self.wires[0]


@dataclasses.dataclass(frozen=True)
class Wire(Method):
    """One all-reduce of all numbers, each in a format of few bits: see docs/wires.md.

    Args:
        name: name of the wire.
        feedback: whether the rounding error of one step is added to the gradients of the next; by
            default on wires of less than 8 bits.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method={"head": Wire("bf16"), "*": Wire("int8", True)})
    """

    name: str = LOSSLESS
    feedback: bool | None = None

    def __post_init__(self) -> None:
        wires.checked(self.name, "name")
        arguments.optional(arguments.flag, self.feedback, "feedback")
        default = FORMATS[self.name].feedback
        wanted = default if self.feedback is None else self.feedback
        object.__setattr__(self, "feedback", wanted and not self.lossless)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether every number arrives unchanged."""
        return FORMATS[self.name].lossless

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether the wire rounds at random."""
        return FORMATS[self.name].rounds_at_random(with_residual=bool(self.feedback))

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        """The only wire."""
        return (self.name,)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the residual, with feedback."""
        return {RESIDUAL: Kept(gradient.shape)} if self.feedback else {}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum all gradients as one vector, in one all-reduce."""
        flat = joined(load.gradients)
        if not self.feedback:
            return separated(load.all_reduce(flat, self.name), load.gradients)
        total, lost = load.all_reduce(flat, self.name, joined(load.kept(RESIDUAL)))
        load.keep(RESIDUAL, separated(lost, load.gradients))
        return separated(total, load.gradients)

    def __str__(self) -> str:
        return self.name + (" + feedback" if self.feedback else "")


def checked_method(given: Method | str, name: str, *others: str) -> Method:
    """Return a method, or the wire of a name.

    Args:
        given: the user's value.
        name: name of the argument.
        others: names that the caller accepts besides wires.
    """
    if isinstance(given, Method):
        expected = "a tuple of the wires that the method sends on, such as ('bf16',)"
        arguments.items(given.wires, f"wires of {given!r}", expected, wires.checked)
        return given
    other = "a method of tfscale.compression, such as PowerSGD(rank=4)"
    return Wire(arguments.choice(given, name, (*wires.WIRES, *others), other))


def refuse_several_exchanges(methods: Iterable[Method]) -> None:
    """Raise ``ValueError`` unless all methods send a bucket in one exchange, as only wires do."""
    for method in methods:
        if not isinstance(method, Wire):
            raise ValueError(
                f"{method} needs more than one exchange for each bucket, but with fragments, delay "
                "or a bound on staleness tfscale runs only one exchange while training continues. "
                'Use a wire, such as wire="int8"; or leave out fragments, delay or the bound'
            )


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenate tensors to one vector."""
    flat = [x if x.shape.rank == 1 else tf.reshape(x, [-1]) for x in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def separated(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Split a vector into tensors: the inverse of ``joined``."""
    parts = [vector] if len(like) == 1 else tf.split(vector, _sizes(like))
    return [_shaped(part, x) for part, x in zip(parts, like, strict=True)]


def _sizes(tensors: Sequence[tf.Tensor]) -> list[Any]:
    """Return the numbers of elements of tensors: as one constant, if the graph knows them."""
    known = [x.shape.num_elements() for x in tensors]
    return known if None not in known else [tf.size(x) for x in tensors]


def _shaped(vector: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    return vector if like.shape.rank == 1 else tf.reshape(vector, tf.shape(like))
