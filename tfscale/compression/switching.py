"""Methods that are made of others, and switch between them during training.

The residual belongs to the variables, and not to the method that has kept it: the next method
continues with it. A method without a residual sends it together with the gradients of its first
step, so nothing is lost when the method changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, checked_method

# The name of the state that says whether a residual may be waiting.
_OWED = "owed"

SHARED = (RESIDUAL, _OWED)  # states that all variants share under one name


class Switching(Method):
    """A method that sums by one of its variants; all replicas use the same one.

    Attributes:
        variants: the methods between which it switches.
        alone: whether it cannot be a variant itself.
    """

    variants: tuple[Method, ...] = ()
    alone: bool = False

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Whether any variant needs seeds."""
        return any(each.random for each in self.variants)

    @property
    def lossless(self) -> bool:  # type: ignore[override]
        """Whether the sums of all variants are exact."""
        return all(each.lossless for each in self.variants)

    @property
    def wires(self) -> tuple[str, ...]:  # type: ignore[override]
        """The formats in which any variant sends."""
        return tuple(dict.fromkeys(wire for each in self.variants for wire in each.wires))

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the states of all variants, which share one residual."""
        states = [each.state(gradient) for each in self.variants]
        kept = {
            name if name in SHARED else of_variant(name, number): one
            for number, state in enumerate(states)
            for name, one in state.items()
        }
        if RESIDUAL in kept and not all(RESIDUAL in state for state in states):
            kept[_OWED] = Kept((), common=True)
        return kept

    def keeps_losses(self, gradient: Gradient) -> bool:
        """Return whether all variants keep what they do not send."""
        return all(each.keeps_losses(gradient) for each in self.variants)


def of_variant(name: str, number: int) -> str:
    """Return the name under which a variant's state is kept."""
    return f"{name}_{number}"


# Runs a variant and returns its sums, and perhaps more tensors, in equal shapes for all variants.
Around = Callable[[Load, Callable[[], list[tf.Tensor]]], list[tf.Tensor]]


def switched(
    load: Load, index: tf.Tensor, method: Switching, around: Around = lambda _, run: run()
) -> list[tf.Tensor]:
    """Sum by the variant of this number, which must be equal on all replicas."""
    load.note(index)
    if method.random:
        # If a variant drew its own seeds, each bucket would wait for the buckets before it that may
        # draw seeds.
        load.draw_for_all_variants()

    def by(number: int) -> list[tf.Tensor]:
        variant = method.variants[number]
        inner = load.within(variant, number)
        return around(inner, lambda: _sums(inner, variant, method))

    branches = [functools.partial(by, number) for number in range(len(method.variants))]
    sums = list(tf.switch_case(index, branches))
    for total, gradient in zip(sums, load.described):
        total.set_shape(gradient.shape)
    return sums


def _sums(load: Load, variant: Method, of: Switching) -> list[tf.Tensor]:
    if isinstance(variant, Switching) or not any(_OWED in of.state(g) for g in load.described):
        return variant.sums(load)
    if any(RESIDUAL in variant.state(each) for each in load.described):
        load.keep(_OWED, [tf.ones([])] * len(load.described))
        return variant.sums(load)
    return _with_residual(load, variant)


def _with_residual(load: Load, variant: Method) -> list[tf.Tensor]:
    """Sum by a method without a residual, together with the residual of other methods."""
    owed = tf.reduce_any(tf.stack(load.kept(_OWED)) > 0)
    given = load.gradients

    def with_rests() -> list[tf.Tensor]:
        return [g + tf.cast(rest, g.dtype) for g, rest in zip(given, load.kept(RESIDUAL))]

    load.gradients = list(tf.cond(owed, with_rests, lambda: [tf.identity(g) for g in given]))
    sums = variant.sums(load)

    def forget() -> tf.Tensor:
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(total)) for total in sums])
        tf.cond(finite, lambda: _forget(load), lambda: tf.constant(0))
        return tf.constant(0)

    tf.cond(owed, forget, lambda: tf.constant(0))
    return sums


def _forget(load: Load) -> tf.Tensor:
    for name in SHARED:
        load.keep(name, [tf.zeros(each.shape) for each in load.variables(name)])
    return tf.constant(0)


def methods_of(given: Sequence[Method | str], name: str) -> tuple[Method, ...]:
    """Return methods that can be parts of another, or the wires of names."""
    return tuple(method_of(each, f"{name}[{place}]") for place, each in enumerate(given))


def method_of(given: Method | str, name: str) -> Method:
    """Return a method that can be a part of another, or the wire of a name."""
    method = checked_method(given, name)
    if isinstance(method, Switching) and method.alone:
        raise ValueError(
            f"{name} is {method!r}, which chooses a method for whole steps, so it cannot be part "
            "of another method. Name one of its methods instead"
        )
    return method
