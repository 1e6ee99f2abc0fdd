"""Buckets and repetitions for a number of classes, a memory, and a risk of confusion."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfscale.support import arguments
from tfscale.support.sizes import number_of_bytes

_FLOAT = 4  # bytes


def repetitions_needed(classes: int, buckets: int, confusion: float) -> int:
    """Return how many repetitions keep all classes apart, but for a probability ``confusion``.

    Two classes share all R buckets with a probability of at most ``B^-R``, and there are less than
    ``K^2 / 2`` pairs, so ``R = 2 log(K / sqrt(confusion)) / log(B)`` is enough.
    """
    classes = arguments.whole(classes, "classes", 2, what="a number of classes", example="50_000")
    buckets = arguments.whole(buckets, "buckets", 2, what="a number of buckets", example="1_024")
    confusion = arguments.real(confusion, "confusion", above=0, below=1, example="0.01")
    return max(math.ceil(2 * math.log(classes / math.sqrt(confusion)) / math.log(buckets)), 1)


def confusion_of(classes: int, buckets: int, repetitions: int) -> float:
    """Return a bound of the probability that two classes share all buckets."""
    exponent = 2 * math.log(classes) - math.log(2) - repetitions * math.log(buckets)
    return min(math.exp(min(exponent, 0.0)), 1.0)


@dataclass(frozen=True)
class Plan:
    """Numbers of buckets and repetitions, and what they cost.

    Attributes:
        classes: number of classes K.
        buckets: number of buckets B.
        repetitions: number of repetitions R.
        width: number of inputs of the last layer.
        state: floats per weight: the weight, its gradient, and the optimizer's slots.
    """

    classes: int
    buckets: int
    repetitions: int
    width: int
    state: int

    @property
    def head_parameters(self) -> int:
        """Weights and biases of all last layers."""
        return self.repetitions * self.buckets * (self.width + 1)

    @property
    def softmax_parameters(self) -> int:
        """Weights and biases of the last layer of a full softmax."""
        return self.classes * (self.width + 1)

    @property
    def head_bytes(self) -> int:
        """Memory of all last layers while all are trained at once."""
        return self.head_parameters * self.state * _FLOAT

    @property
    def times_less(self) -> float:
        """Parameters of a full softmax, divided by those of all last layers."""
        return self.softmax_parameters / self.head_parameters

    @property
    def confusion(self) -> float:
        """Bound of the probability that two classes share all buckets."""
        return confusion_of(self.classes, self.buckets, self.repetitions)

    def seconds(self, samples: int, step: float, batch: int) -> float:
        """Return the time of an epoch of all repetitions, one after another.

        Args:
            samples: number of samples.
            step: measured seconds of a step of one repetition.
            batch: samples of a step.
        """
        return self.repetitions * math.ceil(samples / batch) * step

    def explain(self) -> str:
        """Return the plan in words."""
        one = self.buckets * (self.width + 1) * self.state * _FLOAT
        return "\n".join(
            [
                f"{self.classes:,} classes in {self.repetitions} repetitions of "
                f"{self.buckets:,} buckets",
                f"last layers: {self.head_parameters:,} parameters, "
                f"{self.head_bytes / 1e6:,.1f} MB with gradients and optimizer, "
                f"{one / 1e6:,.1f} MB if one is trained at a time",
                f"full softmax: {self.softmax_parameters:,} parameters, {self.times_less:,.1f} "
                "times as many",
                f"work of the last layers for a sample: {self.times_less:,.1f} times less than "
                f"full softmax; the layers before run {self.repetitions} times, or once with "
                "shared_trunk=True",
                f"probability that two classes share all buckets: at most {self.confusion:.2g}",
            ]
        )


def plan(
    classes: int,
    memory: float | str,
    width: int,
    *,
    confusion: float = 0.01,
    optimizer_slots: int = 2,
) -> Plan:
    """Return the largest power of two as buckets whose repetitions fit into a memory.

    Memory and the variance of estimates depend on B times R. More buckets need fewer repetitions
    to keep classes apart, and so fewer passes through the layers before the last one.

    Args:
        classes: number of classes.
        memory: bytes for all last layers with their gradients and optimizer, such as ``"500MB"``.
        width: number of inputs of the last layer.
        confusion: accepted probability that any two classes share all buckets.
        optimizer_slots: floats that the optimizer keeps for a weight: 2 for Adam, 1 for momentum.

    Raises:
        ValueError: if nothing fits; the message says what the smallest plan takes.

    Example:
        >>> print(tfscale.extreme.plan(345_000, "100MB", width=128).buckets)
        8192
    """
    classes = arguments.whole(classes, "classes", 4, what="a number of classes", example="50_000")
    width = arguments.whole(width, "width", 1, 1 << 24, what="a number of inputs", example="256")
    confusion = arguments.real(confusion, "confusion", above=0, below=1, example="0.01")
    slots = arguments.whole(optimizer_slots, "optimizer_slots", 0, 100)
    most = number_of_bytes(memory, "memory")
    powers = range(1, min(math.ceil(math.log2(classes)), 24))
    plans = [
        Plan(classes, 1 << n, repetitions_needed(classes, 1 << n, confusion), width, 2 + slots)
        for n in powers
    ]
    fitting = [each for each in plans if each.head_bytes <= most and each.times_less > 1]
    if fitting:
        return fitting[-1]
    least = min(plans, key=lambda each: each.head_bytes)
    raise ValueError(
        f"memory is too small for {classes:,} classes with width={width}: the smallest plan takes "
        f"{least.head_bytes:,} bytes, {least.buckets} buckets and {least.repetitions} repetitions; "
        f"got {arguments.shown(memory)}"
    )
