"""Sums gradients over replicas: in buckets, each on its wire, with error feedback."""

from __future__ import annotations

import collections
import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import path_of
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.collectives import Schedule
from tfscale.compression import WirePolicy
from tfscale.exchange import lookups
from tfscale.exchange.buckets import Bucket, Gradient, pack
from tfscale.exchange.exchange import Exchange, joined, separated, wire_bytes
from tfscale.exchange.state import ExchangeState
from tfscale.exchange.trial import Trial, Trials
from tfscale.ops.bucket import BucketId
from tfscale.wires import FORMATS, LOSSLESS

_IDLE = (
    "The wire policy's rule %r matches no trainable variable, and does nothing. It is a regular "
    "expression that is searched in paths such as %s."
)

_SPARSE = (
    "The gradient of %s is sparse (rows of a table) and is sent as fp32: the wire %r, which you "
    "chose for it, is for dense gradients only."
)

# Sees, while a step is traced, what goes out on a lossy wire: the bucket and its wire, the first
# replica's gradients, and what they have lost if that is remembered.
Watch = Callable[[BucketId, str, tf.Tensor, tf.Tensor | None], None]


class Reducer:
    """Sums gradients over all replicas.

    Args:
        exchange: the replicas.
        policy: which gradient is sent on which wire.
        bucket_bytes: how many bytes of gradients share a collective.
        feedback: the wires with error feedback.
        trials: compares, on live steps, schedules whose predicted times are close.
    """

    def __init__(
        self,
        exchange: Exchange,
        policy: WirePolicy,
        bucket_bytes: int,
        feedback: Sequence[str],
        trials: Trials,
    ) -> None:
        self.exchange = exchange
        self.policy = policy
        self.feedback = tuple(feedback)
        self.trials = trials
        # Of optimizers, in the order in which they were traced.
        self.packings: weakref.WeakKeyDictionary[Any, Packing] = weakref.WeakKeyDictionary()
        self.watch: Watch | None = None
        self._bucket_bytes = bucket_bytes
        pack((), policy, bucket_bytes)  # a wrong size is refused now, not in the first step
        self._told: set[str] = set()
        self._names: collections.Counter[str] = collections.Counter()

    def check_rules(self, variables: Sequence[Variable]) -> None:
        """Warn once of rules that match none of these variables: they may be misspelt."""
        paths = [describe(v).path for v in variables]
        for pattern in self.policy.idle(paths):
            self._tell(_IDLE, pattern, ", ".join(paths[:5]))

    def _tell(self, message: str, subject: str, *others: str) -> None:
        """A warning, once for each subject."""
        if subject not in self._told:
            self._told.add(subject)
            logging.getLogger("tfscale").warning(message, subject, *others)

    def remembers(self, variable: Variable) -> bool:
        """Whether a variable's gradients are sent on a wire with error feedback."""
        return self._wire_of(variable) in self.feedback

    def rounds_at_random(self, variable: Variable) -> bool:
        """Whether they are sent on a wire that rounds at random."""
        return self.needs_seed(self._wire_of(variable))

    def needs_seed(self, wire: str) -> bool:
        """Whether a wire rounds at random."""
        return FORMATS[wire].rounds_at_random(with_residual=wire in self.feedback)

    def prepare(
        self, state: ExchangeState, optimizer: Optimizer, variables: list[Variable]
    ) -> None:
        """Make the residuals of wires with error feedback; called on a replica, before ``reduce``.

        Args:
            state: where.
            optimizer: whose variables they are.
            variables: those whose gradients are sent whole, and not as rows.
        """
        shapes = {place_of(optimizer, v): v.shape for v in variables if self.remembers(v)}
        rounding = any(self.rounds_at_random(v) for v in variables)
        if not state.has(shapes, rounding):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: state.prepare(shapes, rounding))

    def _wire_of(self, variable: Variable) -> str:
        one = describe(variable)
        return self.policy.wire_of(one.path, one.shape, one.dtype)

    def reduce(
        self,
        gradients: list[Any],
        variables: list[Variable],
        optimizer: Optimizer,
        state: ExchangeState,
        curvature: Sequence[Any] = (),
    ) -> list[Any]:
        """The sums over all replicas, on each of them; None stays None.

        Args:
            gradients: this replica's, dense or ``IndexedSlices``.
            variables: whose they are.
            optimizer: that will apply them.
            state: what earlier steps lost.
            curvature: what the optimizer wants to be summed besides, for each variable; it
                is sent with the gradients, losslessly, and comes after them in the result.
        """
        both = [*gradients, *curvature]
        described = [describe(v) for v in variables]
        described += [_curvature_of(one) for one in described[: len(curvature)]]
        given = [i for i, x in enumerate(both) if x is not None]
        load = _Load(
            optimizer,
            self._label(optimizer),
            [described[i] for i in given],
            [place_of(optimizer, variables[i % len(variables)]) for i in given],
            state,
        )

        def exchanged(replica: int, tensors: list[Any]) -> list[Any]:
            return self._exchanged(replica, tensors, load)

        sums = self.exchange.together(exchanged, [both[i] for i in given])
        reduced = list(both)
        for i, total in zip(given, sums, strict=True):
            reduced[i] = total
        return reduced

    def _label(self, optimizer: Optimizer) -> str:
        """The optimizer's name, with a number behind it if another had that name before."""
        if optimizer not in self.packings:
            name = getattr(optimizer, "name", type(optimizer).__name__)
            self._names[name] += 1
            times = self._names[name]
            self.packings[optimizer] = Packing(
                name if times == 1 else f"{name} ({times})", (), (), ()
            )
        return self.packings[optimizer].label

    def _exchanged(self, replica: int, tensors: list[Any], load: _Load) -> list[Any]:
        sums = list(tensors)
        dense = [i for i, x in enumerate(tensors) if not isinstance(x, tf.IndexedSlices)]
        described = tuple(load.gradients[i] for i in dense)
        buckets = pack(described, self.policy, self._bucket_bytes) if dense else ()
        sparse = [i for i in range(len(tensors)) if i not in dense]
        self.packings[load.optimizer] = Packing(
            load.label, buckets, described, tuple(load.gradients[i] for i in sparse)
        )
        with self.trials.of_step(self.exchange.communicators[replica]) as trial:
            for bucket in buckets:
                elements = sum(described[i].elements for i in bucket.members)
                travel = _Travel(self, replica, load, bucket, elements, trial)
                members = [dense[i] for i in bucket.members]
                for i, total in zip(members, travel(tensors, members), strict=True):
                    sums[i] = total
        for i in sparse:
            sums[i] = self._sum_sparse(replica, tensors[i], load.label, load.gradients[i])
        return sums

    def _sum_sparse(
        self, replica: int, slices: tf.IndexedSlices, label: str, gradient: Gradient
    ) -> tf.IndexedSlices:
        wire = self.policy.wire_of(gradient.path, gradient.shape, gradient.dtype)
        if wire != LOSSLESS and not gradient.exact:
            self._tell(_SPARSE, gradient.path, wire)
        bucket = sparse_bucket(label, gradient)
        if lookups.are_of_all_samples(slices.indices):
            return self.exchange.sum_rows(replica, slices, bucket)
        return self.exchange.sum_slices(replica, slices, bucket)


@dataclasses.dataclass(frozen=True)
class _Load:
    """The gradients of one step of one optimizer, without their numbers."""

    optimizer: Optimizer
    label: str
    gradients: list[Gradient]
    places: list[str]
    state: ExchangeState


@dataclasses.dataclass(frozen=True)
class Packing:
    """How an optimizer's gradients are sent.

    Args:
        label: what the optimizer is called here.
        buckets: of the dense ones.
        gradients: these, as buckets number them.
        sparse: those of which some rows are sent, each by itself.
    """

    label: str
    buckets: tuple[Bucket, ...]
    gradients: tuple[Gradient, ...]
    sparse: tuple[Gradient, ...]


@dataclasses.dataclass(frozen=True)
class _Travel:
    """One bucket of one replica, from its gradients to their sums."""

    reducer: Reducer
    replica: int
    load: _Load
    bucket: Bucket
    elements: int
    trial: Trial

    def __call__(self, tensors: list[Any], members: list[int]) -> list[tf.Tensor]:
        parts = [tensors[i] for i in members]
        flat = joined(parts)
        if self.bucket.wire not in self.reducer.feedback:
            total = self._sum(flat, None)
            self._show(flat, None)
            return separated(total, parts)
        state, places = self.load.state, self.load.places
        kept = [state.residual(places[i], self.replica) for i in members]
        total, lost = self._sum(flat, joined([residual.read_value() for residual in kept]))
        for residual, value in zip(kept, separated(lost, parts), strict=True):
            residual.assign(value)
        self._show(flat, lost)
        return separated(total, parts)

    def _show(self, flat: tf.Tensor, lost: tf.Tensor | None) -> None:
        watch, wire = self.reducer.watch, self.bucket.wire
        if watch is not None and self.replica == 0 and wire != LOSSLESS:
            watch(dense_bucket(self.load.label, self.bucket), wire, flat, lost)

    def _sum(self, flat: tf.Tensor, residual: tf.Tensor | None) -> Any:
        wire, name = self.bucket.wire, dense_bucket(self.load.label, self.bucket)
        random = self.reducer.needs_seed(wire)
        seed = self.load.state.next_seed(self.replica) if random else 0

        def by(schedule: Schedule) -> Any:
            exchange = self.reducer.exchange
            return exchange.sum(self.replica, flat, name, wire, residual, seed, schedule)

        inputs = [flat] if residual is None else [flat, residual]
        return self.trial.run(by, inputs, wire_bytes(wire, flat.dtype, self.elements))


def whole(gradients: list[Any], variables: list[Variable], sparse_too: bool = False) -> list[Any]:
    """The variables whose gradients are dense, or are sparse and will be added up to dense ones."""
    return [
        v
        for g, v in zip(gradients, variables, strict=True)
        if g is not None and (sparse_too or not isinstance(g, tf.IndexedSlices))
    ]


def dense_bucket(optimizer: str, bucket: Bucket) -> BucketId:
    """What the engine and its log call a bucket, but for where it was traced."""
    return BucketId(bucket.name, optimizer)


def sparse_bucket(optimizer: str, gradient: Gradient) -> BucketId:
    """The same for a gradient of which some rows are sent."""
    return BucketId(f"gradient of {gradient.path}", optimizer)


def describe(variable: Variable) -> Gradient:
    """What is known of a Keras or TensorFlow variable's gradient."""
    return Gradient(path_of(variable), tuple(variable.shape), tf.as_dtype(variable.dtype).name)


def _curvature_of(gradient: Gradient) -> Gradient:
    return dataclasses.replace(gradient, path=f"{gradient.path}/curvature", exact=True)


def place_of(optimizer: Optimizer, variable: Variable) -> str:
    """A variable's place in its optimizer; Keras 2 knows its name."""
    index = getattr(optimizer, "_get_variable_index", None)
    return str(index(variable)) if index else describe(variable).path
