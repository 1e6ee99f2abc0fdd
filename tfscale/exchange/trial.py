"""Compares the cost model's pick with its runner-up on live steps.

If the predicted times of two schedules are close, a bucket uses both in turn during the
first steps. The graph itself counts and times the turns. After the last turn the ranks
exchange their times, so that all ranks make the same choice. As long as steps succeed, all
ranks are in the same turn: ``fit`` and custom loops can call the steps, and no Python needs to
run between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.collectives import Schedule
from tfscale.collectives.choose import COST_MODEL, MEASURED, Choice, Chooser
from tfscale.exchange.collective_schedules import CollectiveSchedules
from tfscale.native import Communicator, all_gather
from tfscale.native.cell import Cell
from tfscale.native.group import host_of

WARM_UP = 6  # turns that do not count
TURNS = WARM_UP + 20  # pick, runner-up, pick, ...
NEAR = 2.0  # predictions that differ by a larger factor need no trial

# A choice costs a bucket about a tenth of a millisecond of processor time in every step, even
# after the trial. A bucket with a shorter predicted time than this has too little to gain.
WORTH_SECONDS = 2e-3


class Trials:
    """All trials of a strategy.

    Args:
        schedules: object that makes the picks. A ``Chooser`` receives the measurements;
            schedules that the user named are never on trial.
        enabled: whether there are trials; False accepts every pick.

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
        """Return a context in which one step of one rank is traced; each bucket runs once."""
        self.tell_chooser()
        enabled = self._enabled and not tf.executing_eagerly()
        return Trial(self._schedules, communicator, self._under_way if enabled else None)

    def tell_chooser(self) -> None:
        """Give the chooser the results of the trials that have ended.

        ``of_step`` calls this method before it makes new choices. All ranks trace the same
        function after the same steps, so all ranks know the same trials then.
        """
        if not isinstance(self._schedules, Chooser):
            return
        for trial in [trial for trial in self._under_way if trial.is_over()]:
            for wire_bytes, choice in trial.results():
                self._schedules.decide(wire_bytes, choice)
            self._under_way.remove(trial)


class Trial:
    """Trial of one step's buckets, and context of the step: see ``Trials.of_step``."""

    def __init__(
        self,
        schedules: CollectiveSchedules,
        communicator: Communicator,
        under_way: list[Trial] | None,
    ) -> None:
        self._schedules = schedules
        self._communicator = communicator
        self._under_way = under_way  # list to which a traced step adds itself; None: no trials
        self._open: list[tuple[int, Choice]] = []  # the buckets on trial
        self._seconds: list[tf.Tensor] = []  # seconds that each of these buckets took

    def compares(self, wire_bytes: int) -> bool:
        """Return whether all-reduces of this size use two schedules in turn."""
        return self._under_way is not None and _is_open(self._schedules.choose(wire_bytes))

    def run(self, reduce: Callable[[Schedule], Any], inputs: Any, wire_bytes: int) -> Any:
        """Return the result of ``reduce`` with the chosen schedule.

        Args:
            reduce: function that runs one all-reduce by a schedule. The bucket's name must not
                depend on the schedule: then ranks that disagree get an error, and none waits
                forever.
            inputs: tensors that the all-reduce begins with; time counts once they are ready.
            wire_bytes: size of the bucket on its wire.
        """
        choice = self._schedules.choose(wire_bytes)
        if not self.compares(wire_bytes):
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
        # TensorFlow runs all clocks of one function one after the other, on all devices. A branch
        # is a function of its own: here, no clock waits for the clock of another bucket.
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

    def __exit__(self, kind: object, error: object, trace: object) -> None:
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
        """Exchange the times of all ranks, and choose the schedule with the shorter time.

        The time of a turn is the time of its fastest rank: that rank came last and did not wait.
        """
        bucket = self._communicator.new_bucket("trial")
        every = all_gather(times[tf.newaxis, WARM_UP:], self._communicator, name=bucket)
        turns = tf.reshape(tf.reduce_min(every, 0), [-1, 2, len(self._open)])
        medians = tf.sort(turns, axis=0)[(TURNS - WARM_UP) // 4]
        self._medians.assign(medians)
        self._running.assign(tf.cast(medians[1] < medians[0], tf.int32))
        return tf.no_op()

    def is_over(self) -> bool:
        """Return whether all turns have been taken."""
        return int(self._turn.numpy()) == TURNS

    def results(self) -> list[tuple[int, Choice]]:
        """Return the sizes of the buckets and the choice for each, once the trial is over."""
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
