"""What a method is: how a bucket's gradients become their sums over all replicas.

A method gets the gradients of one replica, what was kept for them from earlier steps, and the
exchange's collectives; it gives the sums. It runs on all replicas at once, while a step is traced,
and must do the same on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfscale import arguments, wires
from tfscale.compression.gradient import Gradient
from tfscale.wires import FORMATS, LOSSLESS

RESIDUAL = "residual"  # what was not sent yet; the name of a state


def _size(value: int, name: str) -> int:
    return arguments.whole(value, name, 0)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a method keeps for a variable from step to step; it is saved with the optimizer.

    Args:
        shape: of the tensor, which is float32.
        common: whether it is the same on all replicas. Otherwise each replica has its own, and
            they are parts of a sum: for another number of replicas the sum is shared out anew.
        start: makes the first value of that shape; zeros by default. It must be the same on all
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
    """What collectives cost; to be compared with others of the same load.

    Args:
        amount: of it.
        unit: ``"seconds"`` by the cost model where links were measured, and otherwise ``"bytes"``
            that the busiest replica sends.
    """

    amount: float
    unit: str

    def __str__(self) -> str:
        if self.unit == "seconds":
            return f"{1000 * self.amount:.3g} ms"
        return f"{self.amount:,.0f} bytes"


class Load(Protocol):
    """The gradients of one bucket on one replica, and what a method may do with them.

    Attributes:
        gradients: this replica's, float32, in the order of ``described``.
        described: what they are.
        replicas: how many there are.
        rank: which of them this one is.
        on_cpu: whether it computes on a CPU.
    """

    gradients: list[tf.Tensor]
    described: list[Gradient]
    replicas: int
    rank: int
    on_cpu: bool

    @property
    def step(self) -> tf.Tensor:
        """How many updates the optimizer has made, an int64."""

    def kept(self, name: str) -> list[tf.Tensor]:
        """What was kept by that name for each gradient."""

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """Keep these until the next step. What is common must be the same on all replicas."""

    def variables(self, name: str) -> list[tf.Variable]:
        """Where that is kept, for operations that change it in place."""

    def price(self, reduced: Sequence[int] = (), gathered: Sequence[int] = ()) -> Price:
        """What collectives of these sizes cost; the same on all replicas.

        Args:
            reduced: bytes that each replica would give to each ``all_reduce``.
            gathered: the same for each ``all_gather``.
        """

    def say(self, reason: str) -> None:
        """Tell ``explain()`` why the bucket is summed in this way."""

    def all_reduce(
        self, x: tf.Tensor, wire: str = LOSSLESS, residual: tf.Tensor | None = None, what: str = ""
    ) -> Any:
        """The sum of x over all replicas; with a residual, ``(sum, new_residual)``.

        Args:
            x: a tensor, of one shape on all replicas.
            wire: the format in which it is sent.
            residual: what earlier calls have lost, of x's shape.
            what: a name for it, which another call for the same bucket must not have.
        """

    def all_gather(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """The rows of all replicas' x, in the order of their ranks; shapes must be equal."""

    def reduce_scatter(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """This replica's share of the rows of x's sum: ``[r n / P, (r + 1) n / P)`` of n rows,
        which must be a multiple of P.
        """

    def seed(self) -> tf.Tensor:
        """An int64: another one at each call and in each step, the same on all replicas.

        Only for methods with ``random``.
        """

    def within(self, variant: Method, number: int) -> Load:
        """The same gradients for one of the methods that this one is made of, by its number."""

    def note(self, number: tf.Tensor) -> None:
        """Tell ``explain()`` by which of these methods the bucket is summed in this step."""

    def adapted(self, method: Any) -> list[tf.Tensor]:
        """The sums by that of its variants which is chosen on live steps: see ``Adaptive``."""


class Method:
    """How a bucket's gradients become their sums over all replicas.

    To make your own, write a frozen dataclass: methods that are equal share buckets.

    Attributes:
        random: whether it asks for seeds.
        lossless: whether its sums are exact, for every type.
        others: the methods that ``suited`` leaves gradients to.
        wires: the formats in which it sends anything.

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
        """The method for this gradient: itself, or another where it would not pay."""
        return self

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """What is kept for this gradient, by names such as variables in Python have."""
        return {}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """The sums over all replicas, the same bits on each; called while a step is traced."""
        raise NotImplementedError

    @property
    def rows_wire(self) -> str:
        """The format for a gradient of which only some rows are sent: the first of ``wires``."""
        return self.wires[0]


@dataclasses.dataclass(frozen=True)
class Wire(Method):
    """One all-reduce of all numbers, each in a format of few bits: see docs/wires.md.

    Args:
        name: of the wire.
        feedback: whether what rounding loses in one step is added to the gradients of the next;
            by default on wires of less than 8 bits.

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
        """Whether every number arrives as it was."""
        return FORMATS[self.name].lossless

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether it rounds at random."""
        return FORMATS[self.name].rounds_at_random(with_residual=bool(self.feedback))

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        """Its only wire."""
        return (self.name,)

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """The residual, with feedback."""
        return {RESIDUAL: Kept(gradient.shape)} if self.feedback else {}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """One all-reduce of all gradients, as one vector."""
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
        given: what the user passes.
        name: of the argument.
        others: names that the caller knows besides wires.
    """
    if isinstance(given, Method):
        return given
    other = "a method of tfscale.compression, such as PowerSGD(rank=4)"
    return Wire(arguments.choice(given, name, (*wires.WIRES, *others), other))


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors as one vector."""
    flat = [tf.reshape(x, [-1]) for x in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def separated(vector: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The inverse of ``joined``."""
    if len(like) == 1:
        return [tf.reshape(vector, tf.shape(like[0]))]
    parts = tf.split(vector, [tf.size(x) for x in like])
    return [tf.reshape(part, tf.shape(x)) for part, x in zip(parts, like)]
