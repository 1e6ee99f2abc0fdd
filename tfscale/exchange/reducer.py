"""Sums the gradients of a step over a team, in buckets, each bucket by its method."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfscale.bridge.objects import native
from tfscale.bridge.protocols import Optimizer, Variable
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import RESIDUAL, Kept, Method, Wire
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange.backpressure import Backpressure
from tfscale.exchange.bucket_sum import BucketSum, Matrix, Summands, Watch
from tfscale.exchange.buckets import Bucket, pack
from tfscale.exchange.packing import Collective, Packing, describe, place_of
from tfscale.exchange.slots import COMMON, ON_EACH, ROUNDING_SEED, Slot, Slots
from tfscale.exchange.team import Team, wire_bytes
from tfscale.exchange.trial import Trials
from tfscale.native.bucket import BucketId

_IDLE = (
    "The rule %r matches no trainable variable, and does nothing. It is a regular "
    "expression that is searched in paths such as %s."
)

_SPARSE = (
    "The gradient of %s is sparse (rows of a table), and its rows are sent as fp32: %r, which you "
    "chose for it, is for dense gradients here."
)


class Cut(Protocol):
    """The parts of some arrays that replicas hold; see ``parallel``.

    Attributes:
        is_even: whether each replica holds an equal part of each array.
    """

    is_even: bool

    def matrix(self, members: Sequence[int]) -> Matrix:
        """Return the matrix of these arrays."""


class Reducer:
    """Object that sums gradients over all replicas of a team.

    A dense gradient shares a bucket with others of its method and type; a sparse gradient is a
    bucket by itself. ``BucketSum`` sums a bucket.

    Args:
        team: team of the replicas.
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
        team: Team,
        policy: MethodPolicy,
        bucket_bytes: int,
        trials: Trials,
        what: str = "gradients",
        keeps_as: str = "",
        suffix: str = "",
    ) -> None:
        self.team = team
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
        self._warned: set[str] = set()
        self._names: collections.Counter[str] = collections.Counter()

    def change_policy(self, policy: MethodPolicy) -> None:
        """Use another policy in steps that are traced from now on; all workers must do so at once.

        Args:
            policy: the policy.
        """
        lossy = [method for method in policy.methods if not method.lossless]
        if lossy and not self.team.sends_rows_on_wires:
            raise ValueError(
                f"the policy sends gradients as {str(lossy[0])!r}, and TensorFlow's collectives, "
                "which this strategy uses, were checked for the first policy only: use "
                "backend='engine'"
            )
        self.policy = policy

    def check_rules(self, variables: Sequence[Variable]) -> None:
        """Warn once of each rule that matches none of these variables: it may be misspelt."""
        paths = [describe(v).path for v in variables]
        for pattern in self.policy.idle(paths):
            self._warn_once(_IDLE, pattern, ", ".join(paths[:5]))

    def _warn_once(self, message: str, subject: str, *others: str) -> None:
        """Log a warning, once for each subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            logging.getLogger("tfscale").warning(message, subject, *others)

    def prepare(
        self,
        state: Slots,
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
            as_rows = rows_too and isinstance(value, tf.IndexedSlices)
            method = (self.method_of_rows if as_rows else self.policy.method_of)(gradient)
            random |= method.random
            kept = _checked(method.state(gradient), method)
            slots += [_slot(self.keeps_as + name, place, each) for name, each in kept.items()]
        slots += [ROUNDING_SEED] if random else []
        if not state.has(slots):
            # The first replica does it for all: in a branch of a step, none can wait for others.
            of_all = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), 0)
            with tf.init_scope(), of_all:
                of_all.merge_call(lambda _: state.prepare(slots))

    def method_of_rows(self, gradient: Gradient) -> Wire:
        """Return the wire for the rows of a sparse gradient."""
        if not self.team.sends_rows_on_wires:
            return Wire()
        method = self.policy.method_of(gradient)
        return Wire(method.rows_wire, RESIDUAL in method.state(gradient))

    def reduce(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: Slots,
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
        tensors = [gradients[i] for i in given]
        own = [variables[i] for i in given]
        summands = self.summands(own, optimizer, state, label, scale)
        sum_step = functools.partial(self._sum, summands, BucketSum.sum, self._bucket_bytes)

        def sum_unless_skipped(replica: int, values: list[Any]) -> list[Any]:
            *own, skipped = values
            found: list[Any] = tf.cond(skipped, lambda: own, lambda: sum_step(replica, own))
            return found

        if skip is None:
            sums = self.team.together(sum_step, tensors)
        else:
            sums = self.team.together(sum_unless_skipped, [*tensors, skip])
        done = dict(zip(given, sums, strict=True))
        return [done.get(i) for i in range(len(gradients))]

    def scatter(
        self,
        gradients: list[Any],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: Slots,
        cut: Cut,
        scale: Any = None,
    ) -> list[Any]:
        """Return this replica's parts of the sums over all replicas; None stays None.

        The rows of a sparse gradient are summed whole.

        Args:
            gradients: gradients of this replica, dense or ``IndexedSlices``.
            variables: variables of the gradients.
            optimizer: optimizer that will apply the sums.
            state: state with what earlier steps have lost.
            cut: what each replica holds.
            scale: factor in the gradients, if it may change in the next step.
        """
        given = [i for i, x in enumerate(gradients) if x is not None]
        own = [variables[i] for i in given]
        summands = self.summands(own, optimizer, state, scale=scale)

        def scattered(replica: int, tensors: list[Any]) -> list[Any]:
            backpressure = Backpressure()

            def parts(one: BucketSum, tensors: list[Any]) -> list[Any]:
                if one.bucket.rows:
                    return one.sum(tensors)
                own = one.scatter(tensors, cut.matrix([given[i] for i in one.bucket.members]))
                backpressure.sent(tensors, own)
                return own

            return self._sum(summands, parts, self._bytes_of(cut), replica, tensors)

        found = self.team.together(scattered, [gradients[i] for i in given])
        done = dict(zip(given, found, strict=True))
        return [done.get(i) for i in range(len(gradients))]

    def spread(
        self,
        parts: Sequence[tf.Tensor],
        variables: Sequence[Variable],
        optimizer: Optimizer,
        cut: Cut,
        policy: MethodPolicy,
    ) -> None:
        """Assign variables, on each replica, from the parts of all replicas.

        All replicas, also the one that has a part, get what is left of it after its wire.

        Args:
            parts: this replica's part of each variable.
            variables: the variables.
            optimizer: optimizer of the variables.
            cut: what each replica holds.
            policy: the policy that says on which wire each variable is sent.
        """
        described = tuple(describe(v) for v in variables)
        buckets = pack(described, policy, self._bytes_of(cut), what=self._what)
        packing = dataclasses.replace(
            self._packing(optimizer, None), buckets=buckets, gradients=described, collectives={}
        )
        self.packings[optimizer] = packing

        def assigned(replica: int, own: list[Any]) -> list[Any]:
            done: list[Any] = []
            for bucket in buckets:
                # Two buckets in flight keep the link busy. More would only take memory.
                with tf.control_dependencies(done[-2:-1]):
                    matrix = cut.matrix(bucket.members)
                    row = matrix.row([own[i] for i in bucket.members])
                    every = self._gathered(packing, bucket, replica, row)
                    wholes = matrix.wholes(every)
                copies = [native(variables[i]).values[replica] for i in bucket.members]
                for copy, whole in zip(copies, wholes, strict=True):
                    copy.assign(whole)
                done.append(tf.identity(every[:1, :1]))
            return done

        self.team.together(assigned, list(parts))

    def _gathered(
        self, packing: Packing, bucket: Bucket, replica: int, row: tf.Tensor
    ) -> tf.Tensor:
        """Return the rows of all replicas."""
        (wire,) = bucket.method.wires
        name, schedule = packing.name(bucket), self.team.halved(wire, row)
        size = self.team.size * wire_bytes(wire, row.dtype, row.shape.num_elements())
        half = (schedule.name, "each replica sends its parts")
        packing.collectives[bucket] = [Collective(name, size // 2, half=half)]
        return self.team.gather(replica, row, name, wire, schedule=schedule)

    def _bytes_of(self, cut: Cut) -> int:
        """Return the size of buckets: owned arrays share one, which is full if it is large."""
        return self._bucket_bytes if cut.is_even else sys.maxsize

    def summands(
        self,
        variables: Sequence[Variable],
        optimizer: Optimizer,
        state: Slots,
        label: str | None = None,
        scale: Any = None,
    ) -> Summands:
        """Return a description of what is to be summed, one gradient for each variable."""
        return Summands(
            self.team,
            optimizer,
            [describe(v) for v in variables],
            [place_of(optimizer, v) for v in variables],
            state,
            self._packing(optimizer, label),
            scale,
            keeps_as=self.keeps_as,
            watch=self.watch,
        )

    def _packing(self, optimizer: Optimizer, label: str | None) -> Packing:
        """Return the last packing; its label gets a number if another optimizer has the same."""
        if optimizer not in self.packings:
            name = label or str(getattr(optimizer, "name", type(optimizer).__name__))
            self._names[name] += 1
            times = self._names[name]
            self.packings[optimizer] = Packing(name if times == 1 else f"{name} ({times})")
        return self.packings[optimizer]

    def _sum(
        self,
        summands: Summands,
        sums_of: Callable[[BucketSum, list[Any]], list[Any]],
        bucket_bytes: int,
        replica: int,
        tensors: list[Any],
    ) -> list[Any]:
        """Return the sums of the gradients of one step, or parts of them, on one replica."""
        packing = dataclasses.replace(
            self.packings[summands.optimizer],
            buckets=tuple(self._buckets(summands.gradients, tensors, bucket_bytes)),
            gradients=tuple(summands.gradients),
            collectives={},
            reasons={},
        )
        self.packings[summands.optimizer] = packing
        summands = dataclasses.replace(summands, packing=packing, endings=[])
        sums = list(tensors)
        with self.trials.of_step(self.team.communicators[replica]) as trial:
            for bucket in packing.buckets:
                one = BucketSum(summands, replica, bucket, trial)
                own = [tensors[i] for i in bucket.members]
                for i, total in zip(bucket.members, sums_of(one, own), strict=True):
                    sums[i] = total
                packing.collectives[bucket] = one.collectives
            for end in summands.endings:
                end()
        return sums

    def _buckets(
        self, gradients: list[Gradient], tensors: list[Any], bucket_bytes: int
    ) -> Iterator[Bucket]:
        """Yield the buckets of dense gradients, then one bucket for each sparse gradient."""
        sparse = [i for i, x in enumerate(tensors) if isinstance(x, tf.IndexedSlices)]
        dense = [i for i in range(len(tensors)) if i not in sparse]
        own = [gradients[i] for i in dense]
        for bucket in pack(own, self.policy, bucket_bytes, what=self._what):
            members = tuple(dense[i] for i in bucket.members)
            yield dataclasses.replace(bucket, members=members)
        for i in sparse:
            gradient, wire = gradients[i], self.method_of_rows(gradients[i])
            method = self.policy.method_of(gradient)
            if wire.name == LOSSLESS and not method.lossless:
                self._warn_once(_SPARSE, gradient.path, str(method))
            yield Bucket(f"gradient of {gradient.path}", wire, gradient.dtype, (i,), rows=True)


def _slot(name: str, place: str, kept: Kept) -> Slot:
    """Return the slot of what a method keeps for the variable at this place."""
    return Slot(name, place, kept.shape, COMMON if kept.common else ON_EACH, start=kept.start)


def _checked(kept: Mapping[str, Kept], method: Method) -> Mapping[str, Kept]:
    for name in kept:
        if not name.isidentifier():  # prefixes and numbers of variants are joined to it
            raise ValueError(
                f"the state() of {method} declares the name {name!r}, which is not a valid name of "
                "a Python variable. Use a name such as 'residual'"
            )
    return kept
