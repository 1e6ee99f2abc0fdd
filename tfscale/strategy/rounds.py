"""Rounds: steps that each replica makes alone, and what replicas do before and after them.

While a step of ``fit`` is traced, ``Course`` adds to it, on every replica: the count of steps; what
the rule does at a round's beginning and end, in branches that only these steps enter; and, before a
step of an evaluation, the weights that are to be evaluated. No Python runs in between.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfscale.bridge.objects import counter_of, innermost, native, optimizers_of
from tfscale.bridge.tensorflow import PerReplica
from tfscale.compression.method import Kept
from tfscale.exchange.explain import rows
from tfscale.exchange.reducer import Reducer, describe, place_of
from tfscale.exchange.state import ExchangeState
from tfscale.exchange.trial import Cell
from tfscale.ops.bucket import BucketId
from tfscale.ops.group import host_of
from tfscale.strategy.current import current, during
from tfscale.strategy.variables import LocalWeight
from tfscale.sync.period import table_of
from tfscale.sync.rule import Rule

if TYPE_CHECKING:
    from tfscale.strategy.strategy import ScaleStrategy

# What is kept besides what a rule keeps: steps of this round, rounds that are over, and all steps
# that the optimizer had made then. If it has made others since, as in a training without rounds
# between two with them, a new round begins.
_POSITION, _ROUNDS, _STEPS = ("position", "sync"), ("rounds", "sync"), ("steps", "sync")
_COUNT = Kept((), common=True)


class Rounds:
    """Those of all models of a strategy.

    Args:
        strategy: whose replicas train.
        rule: when they agree, and on what.
        reducer: computes means by the rule's policy.
    """

    def __init__(self, strategy: ScaleStrategy, rule: Rule, reducer: Reducer) -> None:
        self.strategy = strategy
        self.rule = rule
        self.reducer = reducer
        self._courses: weakref.WeakKeyDictionary[Any, Course] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> Course:
        """The course of a model, which begins with its first step."""
        course = self._courses.get(model)
        if course is None or course.optimizer is not model.optimizer:
            if course is not None and course.is_apart():
                raise RuntimeError(
                    f"the model {model.name!r} has been compiled anew in the middle of a round, "
                    "while its replicas have different weights. At the end of fit they agree: "
                    "compile it then"
                )
            course = self._courses[model] = Course(self, model)
        return course

    def begins(self, model: Any, callbacks: Sequence[Any]) -> None:
        """A ``fit`` begins, outside of replicas."""
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.SwapEMAWeights):
                raise ValueError(
                    f"SwapEMAWeights does not work with sync={self.rule!r}: it changes weights "
                    "while replicas have different ones. Leave it out, and give the optimizer "
                    "ema_overwrite_frequency=None: at the end of fit it takes the averages"
                )
        optimizer = model.optimizer
        if optimizer is not None:
            end = functools.partial(self._end_of_fit, model, optimizer)
            vars(optimizer)[_END_OF_FIT] = end

    def _end_of_fit(self, model: Any, optimizer: Any, variables: Any) -> None:
        """In place of what Keras calls once at the end of ``fit``."""
        vars(optimizer).pop(_END_OF_FIT, None)
        course = self._courses.get(model)
        if course is not None:
            course.close()
        optimizer.finalize_variable_values(variables)

    def built(self, optimizer: Any, state: ExchangeState) -> None:
        """An optimizer of the scope has been built: it gets an outer one, if the rule has one."""
        if not self.rule.has_outer or state.outer is not None:
            return
        on_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        scope = contextlib.nullcontext() if on_replica else self.strategy.scope()
        with tf.init_scope(), scope:
            outer = self.rule.make_outer()
            self.strategy.optimizers.discard(outer)
            vars(outer).pop("build", None)
            outer.build(optimizer._trainable_variables)
        for variable in outer.variables:
            LocalWeight.make_common(native(variable))
        state.outer = outer

    def words(self) -> str:
        """When replicas agree next, what that costs, and how far they were apart; for people."""
        found = [words for course in self._courses.values() if (words := course.words())]
        return " ".join([f"Replicas agree by {self.rule!r}.", *found])

    def figures(self) -> dict[str, float]:
        """Rounds that are over, and how far weights were from their mean at the last one's end."""
        begun = [course for course in self._courses.values() if course.has_begun]
        return {
            "rounds": sum(course.ended()[1] for course in begun),
            "drift": max((course.drift() for course in begun), default=0.0),
        }

    def before_evaluation(self, model: Any) -> None:
        """On a replica: an evaluation of a model begins, which may be a part of another one."""
        self.of(model).before_evaluation()
        for other, course in list(self._courses.items()):
            if other is not model:
                course.before_evaluation()

    def as_seen(self, variable: LocalWeight) -> Any:
        """What a variable reads as outside of replicas; None if all have the same."""
        own = [course for course in self._courses.values() if id(variable) in course.places]
        return next((x for course in own if (x := course.as_seen(variable)) is not None), None)

    def assigned(self, variable: LocalWeight) -> None:
        """All replicas of a variable have been assigned, outside of replicas."""
        for course in self._courses.values():
            if id(variable) in course.places:
                course.assigned(variable)


_END_OF_FIT = "finalize_variable_values"


class Course:
    """The rounds of one model.

    Attributes:
        optimizer: the model's.
        places: of its variables that replicas have copies of, by their ids: where they stand among
            the model's, or None for the optimizer's.
    """

    def __init__(self, rounds: Rounds, model: Any) -> None:
        self.rule = rounds.rule
        self.optimizer = model.optimizer
        self.places: dict[int, int | None] = {}
        self._rounds = rounds
        self._strategy = rounds.strategy
        self._name = model.name
        self._model = weakref.ref(model)
        self._marks: dict[int, Marks] = {}
        self._statistics: list[Any] = []
        self._spare: dict[Any, Cell] = {}
        self._closing: Any = None
        self._table = table_of(rounds.rule.every)
        with self._on_host():
            self._left, self._more = Cell(tf.int64), Cell(tf.bool)
            self._left.assign(1)
            self._more.assign(True)

    def _refusal(self) -> str:
        """Why the model cannot be trained in rounds; empty if it can."""
        optimizers = optimizers_of(self._trained())
        if len(optimizers) != 1:
            return (
                f"trains models with one optimizer, and {self._name!r} has {len(optimizers)}. Use "
                "sync=tfscale.sync.EveryStep(), the default"
            )
        if innermost(self.optimizer) is not self.optimizer:
            return (
                f"does not train with {type(self.optimizer).__name__}: replicas that train alone "
                "would scale their losses differently. Compile with auto_scale_loss=False, and "
                'train in "mixed_bfloat16"; or use sync=tfscale.sync.EveryStep(), the default'
            )
        return ""

    # -- on a replica, while a step is traced

    def before_step(self) -> Any:
        """A step of training begins. Gives whether replicas make it alone, as ``current`` does."""
        if refusal := self._refusal():
            raise ValueError(f"sync={self.rule!r} {refusal}")
        here = self._here()
        _when(here.marks.shown.read(), here.put_back)
        _when(here.steps.read_value() != here.count(), lambda: here.position.assign(0))
        if self.rule.keeps:
            first = tf.logical_and(here.position.read_value() == 0, here.agree)
            _when(first, lambda: self._by_rule(self.rule.begin, here))
        return True if not self.rule.start else here.rounds.read_value() > 0

    def after_step(self, statistics: Sequence[Any]) -> None:
        """A step of training is done.

        Args:
            statistics: variables that it has assigned, besides what the optimizer has.
        """
        self._statistics = list({id(v): v for v in [*self._statistics, *statistics]}.values())
        here = self._here()
        here.marks.diverge(current.alone)
        here.steps.assign(here.count())
        position = here.position.assign_add(1, read_value=True)
        over = position >= self._steps_of(here.rounds.read_value())
        if self._strategy.extended._num_workers > 1:
            over = tf.logical_or(over, self._left.read() == 0)
        _when(over, lambda: self._end(here))

    def before_evaluation(self) -> None:
        """A step of an evaluation or a prediction begins."""
        if self._trained().built and not self._refusal():
            here = self._here()
            apart = tf.logical_and(here.marks.apart.read(), tf.logical_not(here.marks.shown.read()))
            _when(apart, here.show)

    def spare_row(self, place: int, like: tf.Tensor) -> Cell:
        """Where a replica keeps a row, for a batch in which it holds none."""
        key = (self._replica(), place, like.dtype, like.shape.rank)
        if key not in self._spare:
            shape = [1, *(size or 1 for size in like.shape[1:])]
            with self._on_host():
                cell = self._spare[key] = Cell(like.dtype)
                cell.assign(tf.zeros(shape, like.dtype))
        return self._spare[key]

    def _steps_of(self, rounds: tf.Tensor) -> tf.Tensor:
        """How many steps the round has that so many came before."""
        table = [self.rule.start, *self._table] if self.rule.start else self._table
        last = tf.constant(len(table) - 1, rounds.dtype)
        return tf.gather(
            tf.constant(table, tf.float32), tf.cast(tf.minimum(rounds, last), tf.int32)
        )

    def _end(self, here: _Here) -> None:
        if self.rule.start:  # whose end is no round's
            _when(here.rounds.read_value() > 0, lambda: self._agree(here))
        else:
            self._agree(here)
        here.rounds.assign_add(1)
        here.position.assign(0)

    def _agree(self, here: _Here) -> None:
        self._by_rule(self.rule.end, here)
        here.average(self._statistics, "statistics")
        if self._strategy.extended._num_workers > 1:
            self._agree_on_counts(here)
        here.marks.converge(self.rule)

    def _agree_on_counts(self, here: _Here) -> None:
        """Whether any worker has batches left, and the most steps that one has made."""
        iterations = counter_of(self.optimizer)._get_on_device_or_primary()
        own = [tf.cast(self._left.read(), tf.int32), tf.cast(iterations.read_value(), tf.int32)]
        every = here.gathered(tf.stack(own)[tf.newaxis], "counts")
        iterations.assign(tf.cast(tf.reduce_max(every[:, 1]), iterations.dtype))
        here.steps.assign(here.count())
        if here.replica == 0:
            self._more.assign(tf.reduce_any(every[:, 0] > 0))

    def _by_rule(self, what: Callable[[Any], None], here: _Here) -> None:
        with during(reduced=True, alone=False, rows=None, statistics=None, count=None):
            what(here)

    def _here(self) -> _Here:
        self._prepare()
        replica = self._replica()
        if replica not in self._marks:
            self._marks[replica] = Marks(self.variables, replica)
        return _Here(self, replica, self._marks[replica])

    def _trained(self) -> Any:
        return self._model()

    @staticmethod
    def _replica() -> int:
        return int(tf.distribute.get_replica_context()._replica_id)

    def _prepare(self) -> None:
        """Make what is kept, before the first step."""
        model = self._trained()
        if not model.built:
            raise ValueError(
                f"sync={self.rule!r} trains models that are built, and {self._name!r} is not: call "
                "it on a batch in the strategy's scope, or give it a keras.Input"
            )
        if not self.optimizer.built:
            with tf.init_scope():
                self.optimizer.build(model.trainable_variables)
        self.state = ExchangeState.of(self.optimizer, self._strategy)
        self.trained = list(self.optimizer._trainable_variables)
        self.weights = [native(v) for v in self.trained]
        self.variables = _local(model.variables)
        self.of_optimizer = _local(self.optimizer.variables)
        self.places |= {id(v): None for v in self.of_optimizer}
        self.places |= {id(v): place for place, v in enumerate(self.variables)}
        wanted = {_POSITION: _COUNT, _ROUNDS: _COUNT, _STEPS: _COUNT}
        for v in self.trained:
            kept = Kept(describe(v).shape, common=True)
            wanted |= {(name, place_of(self.optimizer, v)): kept for name in self.rule.keeps}
        if not self.state.has(wanted, False):
            context = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: self.state.prepare(wanted, False))
        self._rounds.reducer.prepare(self.state, self.optimizer, self.trained, self.weights)

    # -- batches, on this worker

    def any_left(self, here: tf.Tensor) -> tf.Tensor:
        """How many replicas get a batch in the next step, as far as this worker knows.

        A worker without batches takes part in the ends of others' rounds, until none has any.

        Args:
            here: how many of this worker's do.
        """
        self._left.assign(tf.reduce_sum(here))
        more = self._more.read()
        found = tf.where(more, tf.maximum(here, 1), here)
        self._more.assign(tf.logical_or(more, tf.reduce_sum(found) == 0))  # the next epoch has
        return found

    # -- outside of replicas

    def is_apart(self) -> bool:
        """Whether replicas have different weights."""
        return any(bool(marks.apart.numpy()) for marks in self._marks.values())

    def as_seen(self, variable: LocalWeight) -> Any:
        """What a variable reads as; None if all replicas have the same value."""
        marks = self._marks.get(0)
        place = self.places[id(variable)]
        if marks is None:
            return None
        if place is None:
            return self._mean_of(variable) if marks.spread.numpy() else None
        if not marks.apart.numpy() or marks.shown.numpy():
            return None
        kept = self._reads_as(variable)
        return self._mean_of(variable) if kept is None else kept.values[0].read_value()

    def _reads_as(self, variable: LocalWeight) -> Any:
        if self.rule.reads_as is None:
            return None
        for trained, weight in zip(self.trained, self.weights, strict=True):
            if weight is variable:
                place = place_of(self.optimizer, trained)
                return self.state.whole(self.rule.reads_as, place)
        return None

    def _mean_of(self, variable: LocalWeight) -> tf.Tensor:
        parts = PerReplica(tuple(v.read_value() for v in variable.values))
        total = self._strategy.reduce("SUM", parts, axis=None)
        return total / tf.cast(self._strategy.extended._num_replicas_in_sync, total.dtype)

    def words(self) -> str:
        """Of this model's next agreement; nothing before its first step."""
        if not self.has_begun:
            return ""
        done, rounds = self.ended()
        counted = float(self.state.whole(*_ROUNDS).numpy())
        left = int(self._steps_of(tf.constant(counted, tf.float32))) - done
        own = [row for row in rows(self._rounds.reducer) if row.bucket.owner == self.label]
        size, seconds = sum(row.bytes for row in own), sum(row.predicted for row in own)
        words = f"{self._name!r} has ended {rounds} rounds, and ends the next in {left} steps"
        if own:
            words += f"; that sums {size:,} bytes"
            words += f", in {1000 * seconds:.2f} ms by the model" if seconds else ""
        if drift := self.drift():
            words += f". At the last end weights were up to {drift:.3g} from their mean"
        return f"{words}."

    @property
    def has_begun(self) -> bool:
        """Whether a step of training has been traced."""
        return bool(self._marks) and self.state.has({_POSITION: _COUNT, _ROUNDS: _COUNT}, False)

    def ended(self) -> tuple[int, int]:
        """How many steps of this round are done, and how many rounds."""
        done, rounds = (int(self.state.whole(*which).numpy()) for which in (_POSITION, _ROUNDS))
        return done, rounds - bool(self.rule.start and rounds)  # the synchronous start is no round

    def drift(self) -> float:
        """Of this process's replicas, the largest distance of weights from their mean."""
        return max(float(marks.drift.numpy()) for marks in self._marks.values())

    def assigned(self, variable: LocalWeight) -> None:
        """A step of training is not to undo that, though an evaluation has put weights aside."""
        place = self.places[id(variable)]
        for replica, marks in self._marks.items():
            if place is not None and tf.executing_eagerly() and marks.shown.numpy():
                marks.aside[place].assign(variable.values[replica].read_value())

    def close(self) -> None:
        """End the round that is under way, and let all replicas agree on everything."""
        if not self._marks or not any(bool(m.spread.numpy()) for m in self._marks.values()):
            return
        if self._closing is None:

            @tf.autograph.experimental.do_not_convert
            def on_replica() -> None:
                self._close_here()

            def closing() -> None:
                self._strategy.extended.call_for_each_replica(on_replica)

            with self._strategy.scope():
                self._closing = tf.function(closing, autograph=False).get_concrete_function()
        self._closing()

    def _close_here(self) -> None:
        here = self._here()
        _when(here.marks.shown.read(), here.put_back)
        _when(here.position.read_value() > 0, lambda: self._end(here))
        _when(here.marks.apart.read(), lambda: self._by_rule(self.rule.settle, here))
        self._by_rule(lambda _: here.average_optimizer(), here)
        here.marks.agree()

    @contextlib.contextmanager
    def _on_host(self) -> Iterator[None]:
        with tf.init_scope(), tf.device(host_of(self._strategy.extended._devices[0])):
            yield

    @property
    def label(self) -> str:
        """What its collectives belong to, in logs."""
        return f"rounds of {self._name}"


class Marks:
    """What one replica remembers from step to step, in no checkpoint.

    Attributes:
        apart: whether replicas may have different weights.
        spread: whether their optimizers may keep different values.
        shown: whether weights have been put aside for those that are evaluated.
        aside: these, one for each of the model's variables.
        drift: how far the weights were from the mean, at the last agreement.
    """

    def __init__(self, variables: Sequence[Any], replica: int) -> None:
        own = [variable.values[replica] for variable in variables]
        with tf.init_scope():
            self.aside = [_cell(v) for v in own]
            with tf.device(host_of(own[0].device)):
                self.apart, self.spread, self.shown = (Cell(tf.bool) for _ in range(3))
                self.drift = Cell(tf.float32)
                self.drift.assign(0.0)
                for flag in (self.apart, self.spread, self.shown):
                    flag.assign(False)

    def diverge(self, alone: Any) -> None:
        """A step has been made, alone or not."""
        for flag in (self.apart, self.spread):
            flag.assign(True if alone is True else tf.logical_or(flag.read(), alone))

    def converge(self, rule: Rule) -> None:
        """A round is over."""
        self.apart.assign(not rule.agrees)

    def agree(self) -> None:
        """On everything."""
        self.apart.assign(False)
        self.spread.assign(False)


def _cell(variable: tf.Variable) -> Cell:
    with tf.device(variable.device):
        return Cell(variable.dtype)


class _Here:
    """A round on one replica: a ``Round`` for its rule."""

    def __init__(self, course: Course, replica: int, marks: Marks) -> None:
        self.replica, self.marks = replica, marks
        self.weights = [v.values[replica] for v in course.weights]
        self._course = course
        self._reducer = course._rounds.reducer
        self._exchange = self._reducer.exchange
        self.replicas = self._exchange.ranks
        self.position = course.state.kept(*_POSITION, replica)
        self.rounds = course.state.kept(*_ROUNDS, replica)
        self.steps = course.state.kept(*_STEPS, replica)

    @property
    def agree(self) -> tf.Tensor:
        """Whether all replicas have the same weights."""
        return tf.logical_not(self.marks.apart.read())

    def count(self) -> tf.Tensor:
        """Of the optimizer's steps."""
        counter = counter_of(self._course.optimizer)._get_on_device_or_primary()
        return tf.cast(counter.read_value(), self.steps.dtype)

    def kept(self, name: str) -> list[tf.Tensor]:
        return [variable.read_value() for variable in self._kept(name)]

    def keep(self, name: str, values: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(self._kept(name), values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def _kept(self, name: str) -> list[tf.Variable]:
        state, course = self._course.state, self._course
        places = [place_of(course.optimizer, v) for v in course.trained]
        return [state.kept(name, place, self.replica) for place in places]

    def mean(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        course = self._course
        sums = self._reducer.reduce(
            list(values), course.trained, course.optimizer, course.state, label=course.label
        )
        means = [total / tf.cast(self.replicas, total.dtype) for total in sums]
        apart = [value - mean for value, mean in zip(values, means, strict=True)]
        self.marks.drift.assign(tf.linalg.global_norm([tf.cast(x, tf.float32) for x in apart]))
        return means

    def average_optimizer(self) -> None:
        self.average(self._course.of_optimizer, "the optimizer's")

    def average(self, variables: Sequence[Any], what: str) -> None:
        """Make these the means over all replicas."""
        own = [v.values[self.replica] for v in variables]
        for variable, mean in zip(own, self._means(own, what), strict=True):
            variable.assign(mean)

    def _means(self, own: Sequence[tf.Variable], what: str) -> list[tf.Tensor]:
        if not own:
            return []
        name = BucketId(what, self._course.label)
        sums = self._exchange.together(
            lambda replica, tensors: self._exchange.sum_all(replica, tensors, name),
            [v.read_value() for v in own],
        )
        return [total / tf.cast(self.replicas, total.dtype) for total in sums]

    def gathered(self, row: tf.Tensor, what: str) -> tf.Tensor:
        """The rows of all replicas."""
        name = BucketId(what, self._course.label)
        (every,) = self._exchange.together(
            lambda replica, own: [self._exchange.gathered(replica, own[0], name)], [row]
        )
        return every

    def outer_step(self, gradients: Sequence[tf.Tensor]) -> None:
        self._course.state.outer.apply(list(gradients), self._course.trained)

    def show(self) -> None:
        """Put the weights aside, and take those that are evaluated."""
        course = self._course
        own = [v.values[self.replica] for v in course.variables]
        for variable, cell in zip(own, self.marks.aside, strict=True):
            cell.assign(variable.read_value())
        kept = [course._reads_as(v) for v in course.variables]
        averaged = [v for v, k in zip(course.variables, kept, strict=True) if k is None]
        for variable, centre in zip(own, kept, strict=True):
            if centre is not None:
                variable.assign(tf.cast(centre.values[self.replica], variable.dtype))
        with during(reduced=True, alone=False, rows=None, statistics=None, count=None):
            self.average(averaged, "weights to evaluate")
        self.marks.shown.assign(True)

    def put_back(self) -> None:
        """Go on with the weights that were put aside."""
        for variable, cell in zip(self._course.variables, self.marks.aside, strict=True):
            own = variable.values[self.replica]
            own.assign(tf.ensure_shape(cell.read(), own.shape))
        self.marks.shown.assign(False)


def _local(variables: Sequence[Any]) -> list[LocalWeight]:
    return [v for v in map(native, variables) if isinstance(v, LocalWeight)]


def _when(condition: Any, action: Callable[[], Any]) -> None:
    """Do that in steps in which the condition holds."""

    def acted() -> tf.Operation:
        action()
        return tf.no_op()

    tf.cond(condition, acted, tf.no_op)
