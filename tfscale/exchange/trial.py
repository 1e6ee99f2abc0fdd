"""Compares the cost model's pick with its runner-up on live steps.

If the predicted times of two schedules are close, a bucket uses them in turn during the
first steps. The graph itself counts the turns and times them. After the last turn the ranks
exchange their times, so that all make the same choice. As long as steps succeed, all ranks
are in the same turn, whoever calls the steps, and no Python needs to run in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfscale.collectives import Schedule
from tfscale.collectives.choose import COST_MODEL, MEASURED, Choice, Chooser
from tfscale.ops import Communicator, all_gather
from tfscale.ops.group import host_of

if TYPE_CHECKING:
    from tfscale.exchange.collective_schedules import CollectiveSchedules

WARM_UP = 6  # turns that do not count
TURNS = WARM_UP + 20  # pick, runner-up, pick, ...
NEAR = 2.0  # predictions that differ by more are believed

# To have a choice costs a bucket about a tenth of a millisecond of processor time in every
# step, for good. One that is predicted to be done sooner than this has too little to win.
WORTH_SECONDS = 2e-3

_numbers = itertools.count()


class Trials:
    """All trials of a strategy.

    Args:
        schedules: makes the picks. A ``Chooser`` is told what was measured; schedules that
            were asked for are never on trial.
        enabled: False takes every pick as it is.

    Example:
        >>> group = tfscale.ops.Group.local(["CPU:0", "CPU:1"])
        >>> link = tfscale.collectives.Link(alpha=1e-3, beta=1e-9)
        >>> trials = Trials(Chooser(link, gamma=1e-10, ranks=2))
        >>> @group.function
        ... def exchange(communicator, gradients):
        ...     def reduce(schedule):
        ...         return tfscale.ops.all_reduce(gradients, communicator, schedule=schedule)
        ...     with trials.of_step(communicator) as trial:
        ...         return trial.run(reduce, gradients, 4_000_000)
    """

    def __init__(self, schedules: CollectiveSchedules, enabled: bool = True) -> None:
        self._schedules = schedules
        self._enabled = enabled
        self._under_way: list[Trial] = []

    def of_step(self, communicator: Communicator) -> Trial:
        """One rank's buckets of one step, of which each runs once; a context for its tracing."""
        self.tell_chooser()
        enabled = self._enabled and not tf.executing_eagerly()
        return Trial(self._schedules, communicator, self._under_way if enabled else None)

    def tell_chooser(self) -> None:
        """Give the chooser what trials have found until now.

        ``of_step`` calls this before it makes new choices. All ranks trace the same function
        after the same steps, so all know the same trials then.
        """
        if not isinstance(self._schedules, Chooser):
            return
        for trial in [trial for trial in self._under_way if trial.is_over()]:
            for wire_bytes, choice in trial.results():
                self._schedules.decide(wire_bytes, choice)
            self._under_way.remove(trial)


class Trial:
    """See ``Trials.of_step``."""

    def __init__(
        self,
        schedules: CollectiveSchedules,
        communicator: Communicator,
        under_way: list[Trial] | None,
    ) -> None:
        self._schedules = schedules
        self._communicator = communicator
        self._under_way = under_way  # where a step with a bucket on trial says so; None: no trials
        self._open: list[tuple[int, Choice]] = []  # the buckets on trial
        self._seconds: list[tf.Tensor] = []  # what each of them took

    def run(self, reduce: Callable[[Schedule], Any], inputs: Any, wire_bytes: int) -> Any:
        """What ``reduce`` makes of the chosen schedule.

        Args:
            reduce: one all-reduce by a schedule. Its bucket's name must not depend on the
                schedule: so ranks that disagree are refused, and none waits in vain.
            inputs: the tensors that it begins with; time counts from when they are there.
            wire_bytes: the bucket's size on its wire.
        """
        choice = self._schedules.choose(wire_bytes)
        if self._under_way is None or not _is_open(choice):
            return reduce(self._schedules.schedule(choice.algorithm))
        if not self._open:
            self._make_cells()
            with tf.device(host_of(self._communicator.device)):
                self._now_running = self._running.read()
        place = len(self._open)
        self._open.append((wire_bytes, choice))
        outputs, seconds = tf.switch_case(
            self._now_running[place],
            [
                lambda name=name: self._timed(reduce, inputs, self._schedules.schedule(name))
                for name in (choice.algorithm, choice.runner_up)
            ],
        )
        self._seconds.append(seconds)
        return outputs

    def _timed(
        self, reduce: Callable[[Schedule], Any], inputs: Any, schedule: Schedule
    ) -> tuple[Any, tf.Tensor]:
        # TensorFlow runs clocks one after the other, on all devices. It does so within a
        # function, and a branch is one: here a clock waits for no other bucket's.
        start = self._clock(inputs)
        with tf.control_dependencies([start]):
            outputs = reduce(schedule)
        return outputs, self._clock(outputs) - start

    def _clock(self, after: Any) -> tf.Tensor:
        host = tf.device(host_of(self._communicator.device))
        with tf.control_dependencies(tf.nest.flatten(after)), host:
            return tf.timestamp()

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._open:
            assert self._under_way is not None
            self._under_way.append(self)
            with tf.device(host_of(self._communicator.device)):
                self._begin()
                turn = self._turn.read()
                tf.cond(turn < TURNS, lambda: self._advance(turn), tf.no_op)

    def _make_cells(self) -> None:
        with tf.init_scope(), tf.device(host_of(self._communicator.device)):
            self._turn = Cell(tf.int32)
            self._running = Cell(tf.int32)  # for each bucket, 0: the pick, 1: the runner-up
            self._times = Cell(tf.float64)  # by turn and bucket
            self._medians = Cell(tf.float64)  # by pick or runner-up, and bucket

    def _begin(self) -> None:
        buckets = len(self._open)
        with tf.init_scope():
            self._turn.assign(0)
            self._running.assign([0] * buckets)
            self._times.assign(tf.zeros([TURNS, buckets], tf.float64))
            self._medians.assign(tf.zeros([2, buckets], tf.float64))

    def _advance(self, turn: tf.Tensor) -> tf.Operation:
        seconds = tf.stack(self._seconds)
        times = tf.tensor_scatter_nd_update(self._times.read(), [[turn]], [seconds])
        following = turn + 1
        self._times.assign(times)
        self._running.assign(tf.fill(tf.shape(seconds), following % 2))
        tf.cond(following == TURNS, lambda: self._conclude(times), tf.no_op)
        self._turn.assign(following)
        return tf.no_op()

    def _conclude(self, times: tf.Tensor) -> tf.Operation:
        """A turn took as long as its fastest rank says: that one came last and did not wait."""
        bucket = self._communicator.new_bucket("trial")
        every = all_gather(times[tf.newaxis, WARM_UP:], self._communicator, name=bucket)
        turns = tf.reshape(tf.reduce_min(every, 0), [-1, 2, len(self._open)])
        medians = tf.sort(turns, axis=0)[(TURNS - WARM_UP) // 4]
        self._medians.assign(medians)
        self._running.assign(tf.cast(medians[1] < medians[0], tf.int32))
        return tf.no_op()

    def is_over(self) -> bool:
        """Whether all turns have been taken."""
        return int(self._turn.numpy()) == TURNS

    def results(self) -> list[tuple[int, Choice]]:
        """What was decided for which sizes, once it is over."""
        running, medians = self._running.numpy(), self._medians.numpy()
        return [
            (wire_bytes, _decided(choice, running[place], medians[:, place]))
            for place, (wire_bytes, choice) in enumerate(self._open)
        ]


def _is_open(choice: Choice) -> bool:
    if choice.why != COST_MODEL or choice.runner_up_seconds is None:
        return False
    return choice.seconds >= WORTH_SECONDS and choice.runner_up_seconds <= NEAR * choice.seconds


def _decided(choice: Choice, winner: int, medians: Any) -> Choice:
    names = (choice.algorithm, choice.runner_up)
    name, other = names[winner], names[1 - winner]
    assert name is not None
    return Choice(name, float(medians[winner]), other, float(medians[1 - winner]), MEASURED)


class Cell:
    """A tensor that a graph may change, known to no strategy and in no checkpoint.

    A ``tf.Variable`` that is made under a strategy's scope would become one of its own,
    mirrored and synchronised.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype
        self._handle = tf.raw_ops.VarHandleOp(
            dtype=dtype, shape=None, shared_name=f"tfscale_cell_{next(_numbers)}"
        )

    def read(self) -> tf.Tensor:
        """The value, as a tensor."""
        return tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype)

    def numpy(self) -> Any:
        """The value now, even while a function is traced."""
        with tf.init_scope():
            return self.read().numpy()

    def assign(self, value: Any) -> None:
        """Sets the value."""
        value = tf.convert_to_tensor(value, self._dtype)
        tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def clear(self) -> None:
        """Frees its memory: it holds no numbers, until others are assigned."""
        with tf.device(self._handle.device):
            self.assign(tf.zeros([0], self._dtype))
