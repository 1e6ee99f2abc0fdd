"""The sum of one bucket on one replica: pack, method, wire, schedule, team, unpack."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfscale.bridge.objects import innermost
from tfscale.bridge.protocols import Optimizer
from tfscale.collectives.wires import FORMATS, LOSSLESS
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Method, Price, Wire, joined
from tfscale.compression.switching import SHARED, of_variant
from tfscale.exchange import rows
from tfscale.exchange.buckets import Bucket
from tfscale.exchange.collective_schedules import price
from tfscale.exchange.packing import Collective, Packing
from tfscale.exchange.slots import Slots
from tfscale.exchange.team import Team, wire_bytes
from tfscale.exchange.trial import Trial
from tfscale.native import Flight
from tfscale.native.bucket import BucketId
from tfscale.native.cell import Cell
from tfscale.native.flight import Taken
from tfscale.native.group import host_of

# Function that is called while a step is traced, for each bucket whose method is not lossless. The
# arguments are the bucket's name, the method, the first replica's gradients, and their residual, or
# None if the method keeps no residual.
Watch = Callable[[BucketId, Method, tf.Tensor, tf.Tensor | None], None]

_SHOWN = 5  # largest number of shapes in a message


@dataclasses.dataclass(frozen=True)
class Summands:
    """The gradients of one optimizer in one step, without their numbers.

    Args:
        team: team of the replicas.
        optimizer: optimizer of the variables.
        gradients: descriptions of the gradients.
        places: places of their variables in the optimizer.
        state: state with what earlier steps have lost.
        packing: description of the step.
        scale: factor in the gradients, if it may change in the next step.
        keeps_as: prefix for the names of the methods' state.
        watch: function that telemetry has set.
        endings: functions to call after the last bucket.
    """

    team: Team
    optimizer: Optimizer
    gradients: list[Gradient]
    places: list[str]
    state: Slots
    packing: Packing
    scale: Any = None
    keeps_as: str = ""
    watch: Watch | None = None
    endings: list[Callable[[], None]] = dataclasses.field(default_factory=list)


class Matrix(Protocol):
    """Arrays as one matrix, whose row r is what rank r is to hold; see ``parallel/matrix.py``."""

    def of_wholes(self, arrays: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the matrix of whole arrays."""

    def wholes(self, matrix: tf.Tensor) -> list[tf.Tensor]:
        """Return the whole arrays from the matrix."""

    def row(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the row of one rank, as a matrix, from the rank's parts of all arrays."""

    def parts(self, row: tf.Tensor, rank: int) -> list[tf.Tensor]:
        """Return the parts of all arrays that a rank holds, from its row."""


class BucketSum:
    r"""The sum of one bucket over a team, on one replica: a ``Load`` for the bucket's method.

    With the gradients :math:`G_r` of rank r, and with what earlier steps have not sent,
    :math:`E_r`, every method and wire with a residual keeps :math:`\sum_r (G_r + E_r) = S + \sum_r
    E_r'`, and gives all ranks the same bits of :math:`S`. A scale of the gradients may change from
    step to step, so residuals are kept without it.

    Args:
        summands: gradients of the step.
        replica: index of the replica in this process.
        bucket: the bucket to sum.
        trial: trial of schedules; None if there is none.
    """

    def __init__(
        self, summands: Summands, replica: int, bucket: Bucket, trial: Trial | None = None
    ) -> None:
        self.described = [summands.gradients[i] for i in bucket.members]
        self.gradients: list[tf.Tensor] = []
        self.replicas = summands.team.size
        self.communicator = summands.team.communicators[replica]
        self.rank, self.device = self.communicator.rank, self.communicator.device
        self.on_cpu = ":CPU:" in self.device.upper()
        self.method: Method = bucket.method
        self.name = summands.packing.name(bucket)
        self.collectives: list[Collective] = []
        self.changes = summands.packing.changes if replica == 0 else []
        self._summands, self._replica, self.bucket = summands, replica, bucket
        self._trial = trial
        self._places = [summands.places[i] for i in bucket.members]
        self._variant: tuple[int, ...] = ()
        self._graph = tf.compat.v1.get_default_graph()
        self._first_seed, self._seeds = None, itertools.count(1)

    # -- sums

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sums of the bucket's gradients, computed by its method."""
        if self.bucket.rows:
            return [self._sum_rows(slices) for slices in tensors]
        given = self._prepare(tensors)
        sums = self._checked(self.method.sums(self))
        return self._given_back(sums, given)

    def scatter(self, tensors: Sequence[Any], matrix: Matrix) -> list[Any]:
        """Return this rank's parts of the bucket's sums; its method must be a wire.

        Args:
            tensors: gradients of this replica.
            matrix: who holds what of the sums.
        """
        given = self._prepare(tensors)
        (wire,), lost = self.method.wires, None
        if self._remembers:
            lost = matrix.of_wholes(self.kept(RESIDUAL))
        x = matrix.of_wholes(self.gradients)
        row = self.reduce_scatter(x, wire, residual=lost)
        half = (self._summands.team.halved(wire, x).name, "each replica gets the sums of its parts")
        self.collectives[-1] = dataclasses.replace(self.collectives[-1], half=half)
        if lost is not None:
            row, lost = row
            self.keep(RESIDUAL, matrix.wholes(lost))
        return self._given_back(matrix.parts(row, self.rank), given)

    def _prepare(self, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Take gradients as the method is to see them; return them as they were given."""
        method, scale = self.method, self._scale
        given = [_of_known_shape(x, g.shape) for x, g in zip(tensors, self.described, strict=True)]
        as_it_is = method.lossless or isinstance(method, Wire)  # wires take all types
        self.gradients = given if as_it_is else [tf.cast(x, tf.float32) for x in given]
        if scale is not None:
            self.gradients = [x / tf.cast(scale, x.dtype) for x in self.gradients]
        return given

    def _given_back(self, sums: Sequence[tf.Tensor], given: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return sums with the scale and the types of the given gradients."""
        scale = self._scale
        if scale is not None:
            sums = [total * tf.cast(scale, total.dtype) for total in sums]
        self._notify_watch()
        return [tf.cast(total, x.dtype) for total, x in zip(sums, given, strict=True)]

    @property
    def _scale(self) -> Any:
        """Scale without which state is kept, since it may change in the next step, or None."""
        keeps = any(self.method.state(each) for each in self.described)
        return self._summands.scale if keeps else None

    def _checked(self, sums: Any) -> list[tf.Tensor]:
        """Return a method's sums as a list; raise unless there is one for each gradient."""
        expected = [x.shape for x in self.gradients]
        if tf.is_tensor(sums):
            raise ValueError(
                f"sums() of {self.method!r} returned a tensor, expected a list of one sum for each "
                f"gradient, of the shapes {_words(expected)}"
            )
        given: list[tf.Tensor] = list(sums)
        found = [total.shape for total in given]
        fits = [total.is_compatible_with(x) for total, x in zip(found, expected)]
        if len(found) != len(expected) or not all(fits):
            raise ValueError(
                f"sums() of {self.method!r} returned {len(found)} tensors of the shapes "
                f"{_words(found)}, expected one sum for each gradient, of the shapes "
                f"{_words(expected)}"
            )
        return given

    def _sum_rows(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Return the sum of rows of a table: see ``rows.py``."""
        wire, lost = self.method.wires[0], None
        if self._remembers:
            (lost,) = self.variables(RESIDUAL)
        scale = None if lost is None else self._summands.scale
        self.collectives.append(Collective(self.name, 0))  # their number differs from step to step
        total = rows.sum_as_one_device(
            self._summands.team,
            self._replica,
            _times(slices, scale, -1),
            self.name,
            wire,
            self._seed_of(wire, lost is not None),
            lost,
        )
        return _times(total, scale, 1)

    def begin(
        self, flight: Flight, tensors: Sequence[tf.Tensor], moves_residual: bool = False
    ) -> None:
        """Begin to sum the bucket in the background; its method must be a wire.

        Args:
            flight: flight that sums the bucket.
            tensors: gradients of this replica.
            moves_residual: whether the sum takes the residual with it, so that another sum, which
                begins before this one is taken, does not send it again.
        """
        wire, lost = self.method.wires[0], self.kept(RESIDUAL) if self._remembers else []
        x = joined([tf.cast(each, tf.float32) for each in tensors])
        flight.begin(
            x,
            schedule=self._summands.team.schedule(wire, x),
            wire=wire,
            residual=joined(lost) if lost else None,
            seed=self._seed_of(wire, bool(lost)),
            name=self.communicator.new_bucket(self.name),
        )
        if moves_residual and lost:
            self.keep(RESIDUAL, [tf.zeros_like(each) for each in lost])

    def take(self, flight: Flight, adds_residual: bool = False) -> tuple[list[tf.Tensor], Taken]:
        """Wait for the sums that ``begin`` has begun; return them, and how long they took.

        Args:
            flight: flight that sums the bucket.
            adds_residual: whether to add the new residual to the present one, if ``begin`` moves
                residuals.
        """
        taken = flight.take([sum(each.elements for each in self.described)], self._remembers)
        if self._remembers:
            lost = self._separated(taken.lost)
            if adds_residual:
                lost = [new + own for new, own in zip(lost, self.kept(RESIDUAL), strict=True)]
            self.keep(RESIDUAL, lost)
        return self._separated(taken.total), taken

    def _separated(self, vector: Any) -> list[tf.Tensor]:
        parts = tf.split(vector, [each.elements for each in self.described])
        return [tf.reshape(part, g.shape) for part, g in zip(parts, self.described, strict=True)]

    def _notify_watch(self) -> None:
        watch = self._summands.watch
        if watch is not None and self._replica == 0 and not self.method.lossless:
            known = all(map(self.method.keeps_losses, self.described))
            lost = joined(self.kept(RESIDUAL)) if known else None
            watch(self.name, self.method, joined(self.gradients), lost)

    # -- what methods ask for: see ``Load``

    @property
    def _remembers(self) -> bool:
        """Whether the method keeps what it does not send."""
        return any(RESIDUAL in self.method.state(each) for each in self.described)

    @property
    def step(self) -> tf.Tensor:
        """See ``Load``."""
        iterations = innermost(self._summands.optimizer).iterations
        return tf.cast(tf.convert_to_tensor(iterations), tf.int64)

    def kept(self, name: str) -> list[tf.Tensor]:
        """See ``Load``."""
        return [variable.read_value() for variable in self.variables(name)]

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        """See ``Load``."""
        variables = self.variables(name)
        if len(values) != len(variables):
            raise ValueError(
                f"{self.method!r} passes {len(values)} values to load.keep({name!r}); expected one "
                f"for each of the {len(variables)} gradients of load.gradients"
            )
        for variable, given in zip(variables, values, strict=True):
            value = tf.convert_to_tensor(given)
            if value.dtype != variable.dtype:
                raise ValueError(
                    f"{self.method!r} keeps {name!r} as {value.dtype.name}; expected "
                    f"{variable.dtype.name}. Cast it: tf.cast(value, tf.{variable.dtype.name})"
                )
            variable.assign(value)

    def variables(self, name: str) -> list[tf.Variable]:
        """See ``Load``."""
        if name not in SHARED:
            for number in reversed(self._variant):
                name = of_variant(name, number)
        kept = functools.partial(self._summands.state.kept, self._summands.keeps_as + name)
        try:
            return [kept(place, self._replica) for place in self._places]
        except KeyError:
            raise ValueError(
                f"{self.method!r} keeps {name!r} between steps, but its state() does not declare "
                f'that: return it there, such as {{"{name}": Kept(gradient.shape)}}'
            ) from None

    def price(self, reduced: Sequence[int] = (), gathered: Sequence[int] = ()) -> Price:
        """See ``Load``."""
        return price(self._summands.team.schedules, self.replicas, reduced, gathered)

    def say(self, reason: str) -> None:
        """See ``Load``."""
        self._summands.packing.reasons[self.bucket, self._variant] = reason

    def all_reduce(
        self, x: tf.Tensor, wire: str = LOSSLESS, residual: tf.Tensor | None = None, what: str = ""
    ) -> Any:
        """See ``Load``."""
        size = wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, size, size), self._seed_of(wire, residual is not None)
        sum_by = functools.partial(
            self._summands.team.sum, self._replica, x, name, wire, residual, seed
        )
        is_in_a_branch = tf.compat.v1.get_default_graph() is not self._graph
        if self._trial is None or is_in_a_branch or not self._trial.compares(size):
            return sum_by()
        return self._trial.run(sum_by, [x] if residual is None else [x, residual], size)

    def all_gather(self, x: tf.Tensor, wire: str = LOSSLESS, what: str = "") -> tf.Tensor:
        """See ``Load``."""
        whole = self.replicas * wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, whole // 2), self._seed_of(wire, self._remembers)
        return self._summands.team.gather(self._replica, x, name, wire, seed, self._remembers)

    def reduce_scatter(
        self,
        x: tf.Tensor,
        wire: str = LOSSLESS,
        what: str = "",
        residual: tf.Tensor | None = None,
    ) -> Any:
        """See ``Load``."""
        whole = wire_bytes(wire, x.dtype, x.shape.num_elements())
        name, seed = self._new(what, whole // 2), self._seed_of(wire, residual is not None)
        return self._summands.team.scatter(self._replica, x, name, wire, seed, residual)

    def seed(self) -> tf.Tensor:
        """See ``Load``."""
        if not self.method.random:
            raise ValueError(
                f"{self.method} calls load.seed(), but its class does not have random = True. Add "
                "that attribute to the class"
            )
        if self._first_seed is None:
            return self._summands.state.next_seed(self._replica)
        return self._first_seed + (next(self._seeds) << 32)

    def draw_for_all_variants(self) -> None:
        """See ``Load``."""
        if self._first_seed is None:
            self._first_seed = self._summands.state.next_seed(self._replica)

    def within(self, variant: Method, number: int) -> BucketSum:
        """See ``Load``."""
        inner = copy.copy(self)
        inner.method, inner._variant = variant, (*self._variant, number)
        return inner

    def note(self, number: tf.Tensor) -> None:
        """See ``Load``."""
        if self._replica != 0:
            return
        notes, key = self._summands.packing.notes, (self.name, self._variant)
        with tf.device(host_of(self.device)):
            if key not in notes:
                with tf.init_scope():
                    notes[key] = Cell(tf.int32)
            notes[key].assign(number)

    def shared(self, make: Callable[[BucketSum, tuple[str, ...]], Any]) -> Any:
        """See ``Load``."""
        packing, kind = self._summands.packing, type(self.bucket.method)
        buckets = tuple(each.name for each in packing.buckets if isinstance(each.method, kind))
        key = (kind, self._replica, buckets)
        if key not in packing.shared:
            packing.shared[key] = make(self, buckets)
        return packing.shared[key]

    def at_end(self, body: Callable[[], None]) -> None:
        """See ``Load``."""
        self._summands.endings.append(body)

    def _seed_of(self, wire: str, with_residual: bool) -> Any:
        return self.seed() if FORMATS[wire].rounds_at_random(with_residual) else 0

    def _new(self, what: str, size: int, reduced: int | None = None) -> BucketId:
        """Return the name of a new collective of the bucket, and describe the collective."""
        if self._variant:  # the name shows in the timeline which method has sent
            what = f"{self.method}: {what}" if what else str(self.method)
        name = self.name
        if what:
            name = name._replace(label=f"{name.label}, {what}")
        self.collectives.append(Collective(name, size, reduced, variant=self._variant))
        return name


def _of_known_shape(x: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Return a tensor with a known shape.

    A gradient from a product with a sparse tensor does not know its shape while it is traced.
    """
    return x if x.shape.is_fully_defined() else tf.ensure_shape(x, shape)


def _times(slices: tf.IndexedSlices, scale: Any, power: int) -> tf.IndexedSlices:
    if scale is None:
        return slices
    scale = tf.cast(scale, slices.dtype)
    return rows.with_numbers(slices, lambda x: x * scale if power > 0 else x / scale)


def _words(shapes: Sequence[Any]) -> str:
    return ", ".join(map(str, shapes[:_SHOWN])) + (", ..." if len(shapes) > _SHOWN else "")
