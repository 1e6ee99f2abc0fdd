"""Sums gradients over replicas in buckets, each bucket by its method."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import index_in, innermost, path_of
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.collectives import Schedule
from tfscale.collectives.wires import FORMATS, LOSSLESS
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Method, Price, Wire, joined
from tfscale.compression.policy import MethodPolicy
from tfscale.compression.switching import SHARED, Switching, of_variant
from tfscale.exchange import lookups
from tfscale.exchange.adaptation import Adaptation, AdaptedStep, as_before
from tfscale.exchange.buckets import Bucket, pack
from tfscale.exchange.collective_schedules import price
from tfscale.exchange.deciding import Change
from tfscale.exchange.exchange import Exchange, wire_bytes, with_unique_rows
from tfscale.exchange.state import COMMON, ON_EACH, ROUNDING_SEED, ExchangeState, Slot
from tfscale.exchange.trial import Cell, Trial, Trials
from tfscale.native import Communicator
from tfscale.native.bucket import BucketId
from tfscale.native.group import host_of

_IDLE = (
    "The rule %r matches no trainable variable, and does nothing. It is a regular "
    "expression that is searched in paths such as %s."
)

_SPARSE = (
    "The gradient of %s is sparse (rows of a table), and its rows are sent as fp32: %r, which you "
    "chose for it, is for dense gradients here."
)

# Function that is called while a step is traced, for each bucket whose method is not lossless. The
# arguments are the bucket's name, the method, the first replica's gradients, and their residual, or
# None if the method keeps no residual.
Watch = Callable[[BucketId, Method, tf.Tensor, tf.Tensor | None], None]


class Reducer:
    """Object that sums gradients over all replicas.

    Args:
        exchange: collectives of the replicas.
        policy: the policy that says which method sums which gradient.
        bucket_bytes: largest number of bytes of gradients that share a collective.
        trials: trials that compare, on live steps, schedules whose predicted times are close.
        what: word for the summed tensors in the names of buckets.
        keeps_as: prefix for the names of the methods' state. A second reducer of the same variables
            needs a prefix of its own.
        suffix: suffix to a variable's path in ``explain()``, if the reducer does not sum the
            variable's gradient.
    """

    def __init__(
        self,
        exchange: Exchange,
        policy: MethodPolicy,
        bucket_bytes: int,
        trials: Trials,
        what: str = "gradients",
        keeps_as: str = "",
        suffix: str = "",
    ) -> None:
        self.exchange = exchange
        self.policy = policy
        self.trials = trials
        # By optimizer, in the order in which the optimizers were traced.
        self.packings: weakref.WeakKeyDictionary[Any, Packing] = weakref.WeakKeyDictionary()
        # Buckets that are summed in the background, while later steps run.
        self.behind_steps: set[BucketId] = set()
        self.watch: Watch | None = None
        self.keeps_as = keeps_as
        self.suffix = suffix
        self._bucket_bytes, self._what = bucket_bytes, what
        pack((), policy, bucket_bytes)  # raises for a wrong size now, not in the first step
        self._told: set[str] = set()
        self._names: collections.Counter[str] = collections.Counter()

    def check_rules(self, variables: Sequence[Variable]) -> None:
        """Warn once of each rule that matches none of these variables: it may be misspelt."""
        paths = [describe(v).path for v in variables]
        for pattern in self.policy.idle(paths):
            self._tell(_IDLE, pattern, ", ".join(paths[:5]))

    def _tell(self, message: str, subject: str, *others: str) -> None:
        """Log a warning, once for each subject."""
        if subject not in self._told:
            self._told.add(subject)
            logging.getLogger("tfscale").warning(message, subject, *others)

    def prepare(
        self,
        state: ExchangeState,
        optimizer: Optimizer,
        variables: Sequence[Variable],
        gradients: Sequence[Any],
        rows_too: bool = True,
    ) -> None:
        """Make the methods' state; a replica calls this method before ``reduce``.

        Args:
            state: state of the optimizer.
            optimizer: optimizer of the variables.
            variables: all variables.
            gradients: current gradients of the variables.
            rows_too: whether sparse gradients will be sent as rows.
        """
        slots: list[Slot] = []
        random = False
        for variable, value in zip(variables, gradients, strict=True):
            if value is None:
                continue
            gradient, place = describe(variable), place_of(optimizer, variable)
            method = self.policy.method_of(gradient)
            random |= method.random
            kept = _checked(method.state(gradient), method)
            if rows_too and isinstance(value, tf.IndexedSlices):
                wire, feedback = self.of_rows(gradient)
                random |= FORMATS[wire].rounds_at_random(with_residual=feedback)
                kept = {RESIDUAL: kept[RESIDUAL]} if feedback else {}
            slots += [_slot(self.keeps_as + name, place, each) for name, each in kept.items()]
        slots += [ROUNDING_SEED] if random else []
        if not state.has(slots):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: state.prepare(slots))

    def reduce(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: ExchangeState,
        scale: Any = None,
        label: str | None = None,
        skip: tf.Tensor | None = None,
    ) -> list[Any]:
        """Return the sums over all replicas, on each replica; None stays None.

        Args:
            gradients: gradients of this replica, dense or ``IndexedSlices``.
            variables: variables of the gradients.
            optimizer: optimizer that will apply the sums.
            state: state with what earlier steps have lost.
            scale: factor in the gradients, if it may change in the next step.
            label: name of the gradients in logs; by default the optimizer's name.
            skip: whether to send nothing, equal on all replicas; if true, each replica gets its own
                gradients.
        """
        given = [i for i, x in enumerate(gradients) if x is not None]
        load = _Load(
            optimizer,
            self.label_of(optimizer, label),
            [describe(variables[i]) for i in given],
            [place_of(optimizer, variables[i]) for i in given],
            state,
            scale,
        )

        def exchanged(replica: int, tensors: list[Any]) -> list[Any]:
            if skip is None:
                return self._exchanged(replica, tensors, load)
            *own, skipped = tensors
            found: list[Any] = tf.cond(
                skipped, lambda: own, lambda: self._exchanged(replica, own, load)
            )
            return found

        tensors = [gradients[i] for i in given]
        sums = self.exchange.together(exchanged, tensors if skip is None else [*tensors, skip])
        reduced = list(gradients)
        for i, total in zip(given, sums, strict=True):
            reduced[i] = total
        return reduced

    def label_of(self, optimizer: Optimizer, label: str | None) -> str:
        """Return the label, or the optimizer's name, plus a number if another has the same."""
        if optimizer not in self.packings:
            name = label or str(getattr(optimizer, "name", type(optimizer).__name__))
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
        buckets = self._pack(described) if dense else ()
        sparse = [i for i in range(len(tensors)) if i not in dense]
        rows = tuple(load.gradients[i] for i in sparse)
        # All graphs of an optimizer share its notes and adaptations.
        before = self.packings[load.optimizer]
        packing = Packing(
            load.label,
            buckets,
            described,
            rows,
            notes=before.notes,
            adaptations=before.adaptations,
        )
        self.packings[load.optimizer] = packing
        communicator = self.exchange.communicators[replica]
        with (
            self.trials.of_step(communicator) as trial,
            _adapted_step(replica, communicator, packing) as adapted,
        ):
            for bucket in buckets:
                members = [dense[i] for i in bucket.members]
                travel = Travel(self, replica, load, bucket, trial, adapted, tensors, members)
                for i, total in zip(members, travel.sums(), strict=True):
                    sums[i] = total
                packing.collectives[bucket] = travel.collectives
        for i in sparse:
            sums[i] = self._sum_sparse(replica, tensors[i], load, i)
        return sums

    def _pack(self, gradients: tuple[Gradient, ...]) -> tuple[Bucket, ...]:
        return pack(gradients, self.policy, self._bucket_bytes, what=self._what)

    def _sum_sparse(
        self, replica: int, slices: tf.IndexedSlices, load: _Load, position: int
    ) -> tf.IndexedSlices:
        gradient = load.gradients[position]
        wire, feedback = self.of_rows(gradient)
        if wire == LOSSLESS and not (method := self.policy.method_of(gradient)).lossless:
            self._tell(_SPARSE, gradient.path, str(method))
        at_random = FORMATS[wire].rounds_at_random(with_residual=feedback)
        seed = load.state.next_seed(replica) if at_random else 0
        residual, place = self.keeps_as + RESIDUAL, load.places[position]
        lost = load.state.kept(residual, place, replica) if feedback else None
        together = lookups.are_of_all_samples(slices.indices)
        add = self.exchange.sum_rows if together else self.exchange.sum_slices
        times = load.scale if feedback else None
        slices = _times(slices, times, -1)
        total = add(replica, slices, sparse_bucket(load.label, gradient), wire, seed, lost)
        if lookups.are_unique(slices.indices):
            total = with_unique_rows(total)
        return _times(total, times, 1)

    def of_rows(self, gradient: Gradient) -> tuple[str, bool]:
        """Return the wire for the rows of a sparse gradient, and whether it has feedback."""
        if not self.exchange.sends_rows_on_wires:
            return LOSSLESS, False
        method = self.policy.method_of(gradient)
        wire = method.rows_wire
        return wire, wire != LOSSLESS and RESIDUAL in method.state(gradient)


@dataclasses.dataclass(frozen=True)
class _Load:
    """The gradients of one step of one optimizer, without their numbers."""

    optimizer: Optimizer
    label: str
    gradients: list[Gradient]
    places: list[str]
    state: ExchangeState
    scale: Any


@dataclasses.dataclass(frozen=True)
class Collective:
    """One of the collectives that sum a bucket.

    Args:
        bucket: name of the collective in the engine, without the place where it was traced.
        bytes: size of an all-reduce that sends as many bytes.
        reduced: size on the wire if the collective is an all-reduce, which needs a schedule.
        variant: numbers of the variants that run the collective, if its method is made of others:
            see ``Switching``.
    """

    bucket: BucketId
    bytes: int
    reduced: int | None = None
    variant: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Packing:
    """A description of how an optimizer's gradients are sent.

    Args:
        label: name of the optimizer here.
        buckets: buckets of the dense gradients.
        gradients: dense gradients, in the order that the buckets refer to.
        sparse: gradients that are sent as rows, each by itself.
        collectives: collectives of each bucket.
        reasons: reasons for the kind of sum, by bucket and variant.
        notes: numbers of the variants that sum a bucket, for methods that are made of others.
        adaptations: adaptations by replica of this process and names of buckets.
    """

    label: str
    buckets: tuple[Bucket, ...]
    gradients: tuple[Gradient, ...]
    sparse: tuple[Gradient, ...]
    collectives: dict[Bucket, list[Collective]] = dataclasses.field(default_factory=dict)
    reasons: dict[tuple[Bucket, tuple[int, ...]], str] = dataclasses.field(default_factory=dict)
    notes: dict[tuple[BucketId, tuple[int, ...]], Cell] = dataclasses.field(default_factory=dict)
    adaptations: dict[tuple[int, tuple[str, ...]], Adaptation] = dataclasses.field(
        default_factory=dict
    )

    @property
    def changes(self) -> list[Change]:
        """Changes of methods during the training, equal on all replicas."""
        every = [one for (replica, _), one in self.adaptations.items() if replica == 0]
        made = [change for one in every if one.decider for change in one.decider.changes]
        return sorted(made, key=lambda change: change.step)

    def variant(self, bucket: Bucket) -> tuple[Method, tuple[int, ...]]:
        """Return the method that summed the bucket in the last step, and the variants' numbers."""
        method: Method = bucket.method
        way: tuple[int, ...] = ()
        while isinstance(method, Switching):
            cell = self.notes.get((dense_bucket(self.label, bucket), way))
            number = 0 if cell is None else int(cell.numpy())
            method, way = method.variants[number], (*way, number)
        return method, way


class Travel:
    """The sum of one bucket on one replica: a ``Load`` for the bucket's method.

    Args:
        reducer: reducer of the gradients.
        replica: index of the replica in this process.
        load: gradients of the step, without numbers.
        bucket: the bucket to sum.
        trial: trial of schedules.
        adapted: choice of methods in this step; None if there is no choice.
        tensors: gradients of the step.
        members: positions of the bucket's gradients in ``tensors``.
    """

    def __init__(
        self,
        reducer: Reducer,
        replica: int,
        load: _Load,
        bucket: Bucket,
        trial: Trial,
        adapted: AdaptedStep | None,
        tensors: list[Any],
        members: list[int],
    ) -> None:
        self.described = [load.gradients[i] for i in members]
        self.replicas = reducer.exchange.ranks
        communicator = reducer.exchange.communicators[replica]
        self.rank, self.on_cpu = communicator.rank, ":CPU:" in communicator.device.upper()
        self.collectives: list[Collective] = []
        self._given = [_of_known_shape(tensors[i], load.gradients[i].shape) for i in members]
        self.gradients = self._given
        self._places = [load.places[i] for i in members]
        self._reducer, self._replica, self._load = reducer, replica, load
        self._bucket, self._trial, self._adapted = bucket, trial, adapted
        self._method: Method = bucket.method
        self.device = communicator.device
        self._variant: tuple[int, ...] = ()
        self._graph = tf.compat.v1.get_default_graph()
        self._first_seed, self._seeds = None, itertools.count(1)

    def sums(self) -> list[tf.Tensor]:
        """Return the sums, computed by the bucket's method."""
        method, scale = self._method, self._load.scale
        if isinstance(method, Switching) and method.random:
            # Draw one seed for all variants. If a variant drew its own seeds, each bucket would
            # wait for the buckets before it that may draw seeds.
            self._first_seed = self._load.state.next_seed(self._replica)
        if not method.lossless and not isinstance(method, Wire):  # wires take all types
            self.gradients = [tf.cast(x, tf.float32) for x in self._given]
        if scale is None or not any(method.state(each) for each in self.described):
            sums = method.sums(self)
        else:  # state is kept without the scale, which may change in the next step
            self.gradients = [x / tf.cast(scale, x.dtype) for x in self.gradients]
            sums = [total * tf.cast(scale, total.dtype) for total in method.sums(self)]
        self._show(method)
        return [tf.cast(total, x.dtype) for total, x in zip(sums, self._given, strict=True)]

    @property
    def _remembers(self) -> bool:
        """Whether the method keeps what it does not send."""
        return any(RESIDUAL in self._method.state(each) for each in self.described)

    @property
    def step(self) -> tf.Tensor:
        """See ``Load``."""
        return tf.cast(tf.convert_to_tensor(innermost(self._load.optimizer).iterations), tf.int64)

    def within(self, variant: Method, number: int) -> Travel:
        """See ``Load``."""
        inner = copy.copy(self)
        inner._method, inner._variant = variant, (*self._variant, number)
        return inner

    @property
    def of(self) -> Method:
        """Method that sums the bucket."""
        return self._method

    @property
    def name(self) -> BucketId:
        """Name of the bucket in the engine and its log, without the place of the trace."""
        return dense_bucket(self._load.label, self._bucket)

    def adapted(self, method: Adaptive) -> list[tf.Tensor]:
        """See ``Load``."""
        if self._adapted is None:
            return as_before(self, method)
        return self._adapted.sums(self, method)

    def note(self, number: tf.Tensor) -> None:
        """See ``Load``."""
        if self._replica != 0:
            return
        notes, key = self._reducer.packings[self._load.optimizer].notes, (self.name, self._variant)
        with tf.device(host_of(self.device)):
            if key not in notes:
                with tf.init_scope():
                    notes[key] = Cell(tf.int32)
            notes[key].assign(number)

    def _show(self, method: Method) -> None:
        watch = self._reducer.watch
        if watch is not None and self._replica == 0 and not method.lossless:
            known = self._remembers and all(map(self._tells_loss, self.described))
            lost = joined(self.kept(RESIDUAL)) if known else None
            watch(self.name, method, joined(self.gradients), lost)

    def _tells_loss(self, gradient: Gradient) -> bool:
        """Return whether the residual holds all that is lost, whichever variant sums."""
        method = self._method
        each = method.variants if isinstance(method, Switching) else (method,)
        return all(one.lossless or RESIDUAL in one.state(gradient) for one in each)

    def kept(self, name: str) -> list[tf.Tensor]:
        """See ``Load``."""
        return [variable.read_value() for variable in self.variables(name)]

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """See ``Load``."""
        for variable, value in zip(self.variables(name), values, strict=True):
            variable.assign(value)

    def variables(self, name: str) -> list[tf.Variable]:
        """See ``Load``."""
        if name not in SHARED:
            for number in reversed(self._variant):
                name = of_variant(name, number)
        name = self._reducer.keeps_as + name
        return [self._load.state.kept(name, place, self._replica) for place in self._places]

    def price(self, reduced: Sequence[int] = (), gathered: Sequence[int] = ()) -> Price:
        """See ``Load``."""
        return price(self._reducer.exchange.schedules, self.replicas, reduced, gathered)

    def say(self, reason: str) -> None:
        """See ``Load``."""
        reasons = self._reducer.packings[self._load.optimizer].reasons
        reasons[self._bucket, self._variant] = reason

    def all_reduce(
        self, x: tf.Tensor, wire: str = LOSSLESS, residual: tf.Tensor | None = None, what: str = ""
    ) -> Any:
        """See ``Load``."""
        size = wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, size, size), self._seed_of(wire, residual is not None)

        def by(schedule: Schedule) -> Any:
            exchange = self._reducer.exchange
            return exchange.sum(self._replica, x, name, wire, residual, seed, schedule)

        if tf.compat.v1.get_default_graph() is not self._graph:  # in a branch or a loop
            schedules = self._reducer.exchange.schedules
            return by(schedules.schedule(schedules.choose(size).algorithm))
        return self._trial.run(by, [x] if residual is None else [x, residual], size)

    def all_gather(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """See ``Load``."""
        whole = self.replicas * wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, whole // 2), self._seed_of(wire, self._remembers)
        exchange = self._reducer.exchange
        return exchange.gathered(self._replica, x, name, wire, seed, self._remembers)

    def reduce_scatter(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """See ``Load``."""
        whole = wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, whole // 2), self._seed_of(wire, False)
        return self._reducer.exchange.scattered(self._replica, x, name, wire, seed)

    def seed(self) -> tf.Tensor:
        """See ``Load``."""
        if not self._method.random:
            raise ValueError(f"{self._method} asks for a seed, but does not say random=True")
        if self._first_seed is None:
            return self._load.state.next_seed(self._replica)
        return self._first_seed + (next(self._seeds) << 32)

    def _seed_of(self, wire: str, with_residual: bool) -> Any:
        return self.seed() if FORMATS[wire].rounds_at_random(with_residual) else 0

    def _new(self, what: str, size: int, reduced: int | None = None) -> BucketId:
        if self._variant:  # the name shows in the timeline which method has sent
            what = f"{self._method}: {what}" if what else str(self._method)
        name = self._name(what)
        self.collectives.append(Collective(name, size, reduced, self._variant))
        return name

    def _name(self, what: str) -> BucketId:
        name = self.name
        return name._replace(label=f"{name.label}, {what}") if what else name


def _adapted_step(
    replica: int, communicator: Communicator, packing: Packing
) -> contextlib.AbstractContextManager[AdaptedStep | None]:
    """Return the context of an adapted step; its value is None if there is nothing to adapt.

    Eager steps measure nothing: replicas take turns there, and Python takes most of the time.
    """
    names = tuple(b.name for b in packing.buckets if isinstance(b.method, Adaptive))
    if not names or tf.executing_eagerly():
        return contextlib.nullcontext()
    key = (replica, names)
    if key not in packing.adaptations:
        packing.adaptations[key] = Adaptation(communicator, len(names))
    return packing.adaptations[key].of_step()


def _of_known_shape(x: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Return a tensor with a known shape.

    A gradient from a product with a sparse tensor does not know its shape while it is traced.
    """
    return x if x.shape.is_fully_defined() else tf.ensure_shape(x, shape)


def _times(slices: tf.IndexedSlices, scale: Any, power: int) -> tf.IndexedSlices:
    if scale is None:
        return slices
    scale = tf.cast(scale, slices.dtype)
    values = slices.values * scale if power > 0 else slices.values / scale
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def _slot(name: str, place: str, kept: Kept) -> Slot:
    """Return the slot of what a method keeps for the variable at this place."""
    return Slot(name, place, kept.shape, COMMON if kept.common else ON_EACH, start=kept.start)


def _checked(kept: Mapping[str, Kept], method: Method) -> Mapping[str, Kept]:
    for name in kept:
        if not name.isidentifier():  # files and checkpoints join it with other words
            raise ValueError(
                f"{method} keeps something by the name {name!r}; take one that could be a "
                "variable's name in Python, such as 'residual'"
            )
    return kept


def dense_bucket(optimizer: str, bucket: Bucket) -> BucketId:
    """Return the name of a bucket in the engine and its log, without the place of the trace."""
    return BucketId(bucket.name, optimizer)


def sparse_bucket(optimizer: str, gradient: Gradient) -> BucketId:
    """Return the name of the bucket of a gradient that is sent as rows."""
    return BucketId(f"gradient of {gradient.path}", optimizer)


def describe(variable: Variable) -> Gradient:
    """Return the description of a Keras or TensorFlow variable's gradient."""
    return Gradient(path_of(variable), tuple(variable.shape), tf.as_dtype(variable.dtype).name)


def place_of(optimizer: Optimizer, variable: Variable) -> str:
    """Return a variable's index in its optimizer; with Keras 2, which has none, its path."""
    index = index_in(optimizer, variable)
    return describe(variable).path if index is None else str(index)
