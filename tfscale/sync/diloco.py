"""DiLoCo: replicas train alone, and then an outer optimizer makes a step by their mean change."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.method import Method, refuse_several_exchanges
from tfscale.compression.policy import MethodPolicy, WirePolicy
from tfscale.support import arguments
from tfscale.sync.period import Period, checked_count, checked_period
from tfscale.sync.rule import Round, Rule, assign

OUTER = "outer"

_BLEND = "how much of a replica's own weights is left when what travelled for delay steps comes in"


@dataclasses.dataclass(frozen=True, repr=False)
class DiLoCo(Rule):
    r"""DiLoCo: an outer optimizer, whose gradient is the mean weight change of a round.

    All P replicas begin a round with the same outer weights W, and make H steps of the model's
    own (inner) optimizer, alone. The outer optimizer then updates W by the outer gradient

    .. math:: \frac{1}{P} \sum_r (W - w_r),

    and all replicas continue from the new W. Each replica keeps its own state of the inner
    optimizer.

    **Fragments and delay.** ``fragments`` divides the weights among F fragments of about equal
    bytes, each weight whole. The rounds of two successive fragments end H / F steps apart, so no
    single step has much to send. With a delay of D steps, replicas send a fragment's weight changes
    :math:`W - w_r(t)`, of step t, while they continue to train. At step t + D the outer optimizer
    updates the fragment's W by the mean of these changes, and each replica takes

    .. math:: w_r \leftarrow \beta w_r(t + D) + (1 - \beta) W.

    Args:
        every: H, the number of steps in a round; or a ``Period``.
        outer: a function that makes an optimizer of Keras; or an optimizer, from whose settings
            the strategy makes one of its own; by default ``SGD(0.7, momentum=0.9,
            nesterov=True)``. With several workers pass a function: an optimizer makes variables,
            and TensorFlow can connect workers only before the first variable.
        wire: format in which weight changes are sent, as ``ScaleStrategy`` takes it.
        method: method that sums weight changes, instead of ``wire``.
        error_feedback: whether a replica adds the error of rounding to ``wire`` in one round to its
            weight changes of the next; True by default.
        fragments: F, the number of fragments; H must be a multiple of F.
        delay: D, the number of steps that replicas make during an exchange; less than H / F.
        blend: :math:`\beta`, the share of a replica's own weights, which contain the steps that it
            has made during the delay; 0.5 by default if there is a delay.

    Example:
        >>> strategy = tfscale.ScaleStrategy(sync=tfscale.sync.DiLoCo(every=100, wire="int8"))

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language
    Models", 2023; Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
    """

    every: int | Period = 100
    outer: Any = None
    wire: str | Mapping[str, str] | WirePolicy | None = None
    method: Method | Mapping[str, Method | str] | MethodPolicy | None = None
    error_feedback: bool | None = None
    fragments: int = 1
    delay: int = 0
    blend: float | None = None

    keeps = kept_weights = (OUTER,)
    has_outer = True

    def __post_init__(self) -> None:
        checked_period(self.every)
        if not (self.outer is None or callable(self.outer) or _is_optimizer(self.outer)):
            expected = (
                "an optimizer of Keras, or a function that makes one, such as lambda: "
                "keras.optimizers.SGD(1.0)"
            )
            raise arguments.wrong(self.outer, "outer", expected)
        arguments.optional(arguments.flag, self.error_feedback, "error_feedback")
        if self.method is not None and (self.wire, self.error_feedback) != (None, None):
            raise ValueError(
                f"method={self.method!r} excludes wire and error_feedback, got wire={self.wire!r} "
                f"and error_feedback={self.error_feedback!r}: both say how differences are sent. "
                "Leave one of them out"
            )
        self._check_stream()
        object.__setattr__(self, "agrees", not self.streams)

    @property
    def streams(self) -> bool:
        """Whether weights are in fragments, or weight changes are sent while replicas train."""
        return self.fragments > 1 or self.delay > 0

    def _check_stream(self) -> None:
        checked_count(self.fragments, "fragments", what="a number of parts")
        checked_count(self.delay, "delay", least=0)
        if self.fragments > 1 and (
            isinstance(self.every, Period) or self.every % self.fragments != 0
        ):
            raise ValueError(
                f"with fragments={self.fragments}, every must be a multiple of {self.fragments} "
                f"steps; got {self.every!r}: the rounds of all fragments end at equal distances"
            )
        if self.delay >= min(self.table()):
            raise ValueError(
                f"delay must be less than {min(self.table())} steps, got {self.delay}: the next "
                f"fragment is sent {min(self.table())} steps later, and only one may be on its way"
            )
        if self.blend is not None:
            arguments.real(self.blend, "blend", 0, below=1, what=_BLEND)
            if not self.delay:
                raise arguments.wrong(self.blend, "blend", f"{_BLEND}, with a delay", "Set delay")
        # ``policy`` raises if a setting is wrong.
        methods = self.policy.methods
        if self.streams:
            refuse_several_exchanges(methods)

    def table(self) -> list[int]:
        """Return the lengths of the first rounds, in steps; each round is one fragment's.

        A round ends ``every / fragments`` steps after the round before.
        """
        return [steps // self.fragments for steps in super().table()]

    def make_outer(self) -> Any:
        """Return a new outer optimizer."""
        if self.outer is None:
            return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True, name="outer")
        if _is_optimizer(self.outer):
            return type(self.outer).from_config(self.outer.get_config())
        made = self.outer()
        if not _is_optimizer(made):
            raise ValueError(f"outer must return an optimizer of Keras, and made {made!r}")
        return made

    def describe(self) -> str:
        """Return all settings, and those of the outer optimizer."""
        outer = self.make_outer()
        settings = {key: value for key, value in outer.get_config().items() if key != "name"}
        return (
            f"every={self.every!r}, {type(outer).__name__} {settings}, {self.policy!r}, "
            f"fragments={self.fragments}, delay={self.delay}, blend={self.blend}"
        )

    @functools.cached_property
    def policy(self) -> MethodPolicy:
        """Methods that send weight changes."""
        if self.method is not None:
            return MethodPolicy.of(self.method)
        feedback = True if self.error_feedback is None else self.error_feedback
        return WirePolicy.of(LOSSLESS if self.wire is None else self.wire).with_feedback(feedback)

    def begin(self, round: Round) -> None:
        """Keep the outer weights."""
        round.keep(OUTER, [weight.read_value() for weight in round.weights])

    def end(self, round: Round) -> None:
        """Step with the outer optimizer from the round's start, or send a fragment's changes."""
        if not self.streams:
            _outer_step(round, round.mean(_changes(round)))
            return
        # A worker without batches ends rounds before ``delay`` steps: finish its exchange now.
        self.land(round)
        _run_one(round.number % self.fragments, self._sends(round))
        if not self.delay:
            self.land(round)

    def land(self, round: Round) -> None:
        """Make a step of the outer optimizer by the sent weight changes, and blend the weights."""
        share = 0.0 if not self.delay else 0.5 if self.blend is None else self.blend
        _run_one(round.in_flight + 1, [tf.no_op, *self._takes(round, share)])

    def settle(self, round: Round) -> None:
        """Finish the rounds of all fragments except the one that has just been received."""
        if not self.streams:
            return
        received = round.in_flight if self.delay else (round.number - 1) % self.fragments
        takes = self._takes(round, share=0.0)
        _run_one(round.in_flight + 1, [tf.no_op, *takes])
        for number, action in (*enumerate(self._sends(round)), *enumerate(takes)):
            _run_one(tf.cast(received == number, tf.int32), [action, tf.no_op])

    def _parts(self, round: Round) -> list[Round]:
        sizes = [weight.shape.num_elements() * weight.dtype.size for weight in round.weights]
        parts = enumerate(fragments_of(sizes, self.fragments))
        return [round.part(number, places) for number, places in parts]

    def _sends(self, round: Round) -> list[Callable[[], None]]:
        """Return actions that send the weight changes of each fragment."""

        def send(part: Round) -> None:
            part.send(_changes(part))

        return [functools.partial(send, part) for part in self._parts(round)]

    def _takes(self, round: Round, share: float) -> list[Callable[[], None]]:
        """Return actions that take the changes of each fragment, and a share of own weights."""

        def take(part: Round, last: bool) -> None:
            own = [weight.read_value() for weight in part.weights]
            _outer_step(part, part.take(_changes(part)), counts=last)
            self.begin(part)
            for weight, value in zip(part.weights, own, strict=True):
                if share:
                    weight.assign(share * value + (1 - share) * weight.read_value())

        parts = self._parts(round)
        return [functools.partial(take, part, part is parts[-1]) for part in parts]


def _changes(round: Round) -> list[tf.Tensor]:
    return [
        start - weight.read_value()
        for start, weight in zip(round.kept(OUTER), round.weights, strict=True)
    ]


def _outer_step(round: Round, means: list[tf.Tensor], counts: bool = True) -> None:
    """Make a step of the outer optimizer from the outer weights."""
    assign(round, round.kept(OUTER))
    round.outer_step(means, counts)


def _run_one(number: tf.Tensor, actions: list[Callable[[], Any]]) -> None:
    """Run only the action with this index."""

    def acted(action: Callable[[], Any]) -> Callable[[], tf.Tensor]:
        def act() -> tf.Tensor:
            action()
            return tf.constant(0)  # every branch must return a value

        return act

    tf.switch_case(number, [acted(action) for action in actions])


def fragments_of(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Return the indices of the weights in each fragment.

    The largest weight comes first. Each weight goes to the fragment that has the fewest bytes so
    far. So layers of the same size go to the fragments in turn, which the paper calls strided.

    Args:
        sizes: size of each weight, in bytes.
        fragments: number of fragments.

    Example:
        >>> fragments_of([4, 4, 4, 4, 1], fragments=2)
        [[0, 2, 4], [1, 3]]
    """
    if fragments > len(sizes):
        raise ValueError(
            f"fragments={fragments}, but the model has {len(sizes)} weights, and each fragment "
            f"needs at least one. Take {len(sizes)} or fewer"
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        # Empty weights count, too, so that they spread out.
        min(parts, key=lambda part: (sum(sizes[i] for i in part), len(part))).append(place)
    return [sorted(part) for part in parts]


def _is_optimizer(thing: Any) -> bool:
    return isinstance(thing, keras.optimizers.Optimizer)
