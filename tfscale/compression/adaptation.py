"""Sums each bucket by the method that was chosen for it, and measures steps to choose the next.

The graph itself runs windows of a few steps each (see ``deciding.py``). The graph uses the methods
that the window prescribes, and times buckets and steps. At the end of the window, ranks exchange
the times, so that all ranks decide from the same numbers. The methods in use, their times and their
errors are saved with the optimizer; everything else begins anew in another process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.collectives.cost import Cost
from tfscale.collectives.registry import resolve
from tfscale.collectives.wires import BLOCK
from tfscale.compression import deciding
from tfscale.compression.deciding import PROBES, WINDOW, Decider, Seen, Step
from tfscale.compression.method import RESIDUAL, Load
from tfscale.compression.switching import Switching, switched
from tfscale.native import all_gather, all_reduce
from tfscale.native.cell import Cell
from tfscale.native.group import host_of

KNOWN = "adaptive"  # the name of the state that holds what is known of a bucket

MOST = 8  # largest number of candidates: all of them are in the graph of each bucket

# The state holds the number of the method in use, then each method's compute seconds, then its
# error.
WIDTH = 1 + 2 * (MOST + 1)

_IN_USE = -1  # an entry of the plan that stands for the method in use
_OF_STEP, _OF_BUCKET = 3, 5  # numbers for a step and for each bucket, in a row: see _step_of
_SAMPLED = 4  # number of gradients of a bucket that are sampled, the largest ones
_BLOCKS = 64  # number of blocks that are sampled from each of these gradients


class Adaptation:
    """State of one replica's buckets of one optimizer whose method is ``Adaptive``.

    Args:
        load: first of these buckets.
        buckets: names of these buckets, in the order of their sums.
    """

    def __init__(self, load: Load, buckets: Sequence[str]) -> None:
        self._communicator, self._names, self._buckets = load.communicator, buckets, len(buckets)
        self._changes = load.changes
        self._cost: Cost = _cost_of(load.replicas)
        self.decider: Decider | None = None
        # The turn of the step that is traced, the methods that the window prescribes, and for each
        # bucket its load, its description and its measurements.
        self._now: Any = None
        self._wanted: Any = None
        self._loads: list[Load] = []
        self._described: list[deciding.Bucket] = []
        self._seen: list[tf.Tensor] = []
        with tf.init_scope(), tf.device(host_of(load.device)):
            self._turn = Cell(tf.int32)
            self._steps = Cell(tf.int32)  # number of steps in the window
            self._looks = Cell(tf.bool)
            self._plan = Cell(tf.int32)  # number of the method, by step and bucket
            self._last = Cell(tf.float64)  # time at which the last step ended, or 0
            self._rows = Cell(tf.float64)
            self._turn.assign(0)
            self._steps.assign(deciding.FIRST)
            self._looks.assign(True)
            self._plan.assign(tf.fill([WINDOW, self._buckets], _IN_USE))
            self._last.assign(0.0)
            self._rows.assign(tf.zeros([WINDOW, _OF_STEP + _OF_BUCKET * self._buckets], tf.float64))

    def sums(self, load: Load, method: Switching, bound: float) -> list[tf.Tensor]:
        """Return the sums of the next bucket, by the method that the window prescribes.

        Args:
            load: the bucket.
            method: method of the bucket, whose variants are the candidates.
            bound: largest relative error.
        """
        if load.name.label == self._names[0]:
            self._begin_step(load)
        place = len(self._loads)
        self._loads.append(load)
        index = tf.where(self._wanted[place] == _IN_USE, in_use(load, method), self._wanted[place])
        clock = functools.partial(_clock, load.device)
        *sums, seen = switched(load, index, method, functools.partial(_watched, clock))
        number = tf.cast(index, tf.float64)
        self._seen.append(tf.concat([seen[:2], number[tf.newaxis], seen[2:]], 0))
        self._described.append(_described(load, method, bound))
        return sums

    def _begin_step(self, load: Load) -> None:
        self._loads, self._described, self._seen = [], [], []
        with tf.device(host_of(load.device)):
            self._now = self._turn.read()
            self._wanted = self._plan.read()[self._now]
        load.at_end(self._end_step)

    def _end_step(self) -> None:
        now, loads, seen = self._now, self._loads, self._seen
        if self.decider is None:
            self.decider = Decider(self._described, self._cost)
        self._now = self._wanted = None  # they would keep the graph alive
        self._loads, self._described, self._seen = [], [], []
        known = tf.stack([load.kept(KNOWN)[0] for load in loads])
        with tf.device(host_of(loads[0].device)):
            # This condition is always true. Its branch is a function of its own, whose clocks do
            # not wait for others: TensorFlow runs all clocks of one function one after the other,
            # on all devices.
            new = tf.cond(
                now >= 0,
                lambda: self._advance(now, seen, known, loads[0].step),
                lambda: known,
            )
            changed = tf.reduce_any(tf.not_equal(new, known) & ~tf.math.is_nan(new))
            tf.cond(changed, lambda: _keep(loads, new), lambda: tf.constant(0))

    # ------------------------------------------------------------- in the graph

    def _advance(
        self, turn: tf.Tensor, seen: list[tf.Tensor], known: tf.Tensor, step: tf.Tensor
    ) -> Any:
        """Record a step after its last bucket, and return what is known then.

        Args:
            turn: index of the step in the window.
            seen: five numbers for each bucket: start, end, method, and the squares of what was lost
                and of what was to be sent.
            known: what is known of each bucket: see ``KNOWN``.
            step: number of the optimizer's updates.
        """
        buckets = tf.stack(seen)
        probes = tf.cond(
            self._looks.read(), lambda: self._probed(buckets), lambda: tf.zeros([2], tf.float64)
        )
        end = tf.reduce_max(buckets[:, 1])
        last = self._last.read()
        seconds = tf.where(last > 0, end - last, 0.0)
        row = tf.concat([seconds[tf.newaxis], probes, tf.reshape(buckets, [-1])], 0)
        rows = tf.tensor_scatter_nd_update(self._rows.read(), [[turn]], [row])
        self._rows.assign(rows)
        with tf.control_dependencies([probes]):
            self._last.assign(tf.timestamp())
        following = turn + 1
        steps = self._steps.read()
        self._turn.assign(tf.where(following < steps, following, 0))
        return tf.cond(
            following < steps, lambda: known, lambda: self._decided(rows, steps, known, step)
        )

    def _probed(self, after: tf.Tensor) -> tf.Tensor:
        times = []
        for size in PROBES:
            with tf.control_dependencies([after]):
                start = tf.timestamp()
            with tf.control_dependencies([start]):
                name = self._communicator.new_bucket(f"links, {size} bytes")
                total = all_reduce(tf.zeros([size // 4]), self._communicator, name=name)
            with tf.control_dependencies([total]):
                after = tf.timestamp()
            times.append(after - start)
        return tf.stack(times)

    def _decided(
        self, rows: tf.Tensor, steps: tf.Tensor, known: tf.Tensor, step: tf.Tensor
    ) -> tf.Tensor:
        bucket = self._communicator.new_bucket("what a window has shown")
        every = all_gather(rows[tf.newaxis, :steps], self._communicator, name=bucket)
        plan, length, looks, new = tf.numpy_function(
            self._decide, [every, known, step], [tf.int32, tf.int32, tf.bool, tf.float32]
        )
        self._plan.assign(tf.ensure_shape(plan, [WINDOW, self._buckets]))
        self._steps.assign(tf.ensure_shape(length, []))
        self._looks.assign(tf.ensure_shape(looks, []))
        return tf.ensure_shape(new, known.shape)

    # ----------------------------------------------------------------- in Python

    def _decide(self, every: Any, known: Any, step: Any) -> tuple[Any, ...]:
        decider = self.decider
        assert decider is not None  # ``_end_step`` made it when the step was traced
        _recall(decider, known)
        ranks = [[_step_of(row) for row in rank] for rank in every]
        before = len(decider.changes)
        window = decider.decide(ranks, [int(n) for n in known[:, 0]], int(step))
        self._changes += decider.changes[before:]
        plan = np.full([WINDOW, self._buckets], _IN_USE, np.int32)
        for turn, methods in enumerate(window.methods):
            if methods is not None:
                plan[turn] = methods
        looks = np.bool_(window.kind == "look")
        return plan, np.int32(len(window.methods)), looks, _to_keep(decider)


def in_use(load: Load, method: Switching) -> tf.Tensor:
    """Return the number of the method in use."""
    number = tf.cast(load.kept(KNOWN)[0][0], tf.int32)
    return tf.clip_by_value(number, 0, len(method.variants) - 1)


def _keep(loads: Sequence[Load], known: tf.Tensor) -> tf.Tensor:
    for load, one in zip(loads, tf.unstack(known)):
        load.keep(KNOWN, [one] * len(load.described))
    return tf.constant(0)


def _watched(
    clock: Callable[[Any], tf.Tensor], load: Load, run: Callable[[], list[tf.Tensor]]
) -> list[tf.Tensor]:
    """Return the sums, and last a tensor of four numbers.

    These numbers are the times at which the sums began and ended, and the squares, in a sample, of
    what was lost and of what was to be sent.
    """
    start = clock(load.gradients)
    sampled = sorted(range(len(load.described)), key=lambda i: -load.described[i].elements)
    sampled = sampled[:_SAMPLED]
    feedback = any(RESIDUAL in load.method.state(each) for each in load.described)
    squares = tf.zeros([2], tf.float64)
    given = load.gradients
    before = []
    if feedback:
        rests = load.variables(RESIDUAL)
        before = [_sample(given[i]) + _sample(rests[i].read_value()) for i in sampled]
    with tf.control_dependencies([start, *before]):
        sums = run()
    end = clock(sums)
    if feedback:
        after = [_sample(load.variables(RESIDUAL)[i].read_value()) for i in sampled]
        squares = tf.stack([_square(after), _square(before)])
    return [*sums, tf.concat([tf.stack([start, end]), squares], 0)]


def _clock(device: str, after: Any) -> tf.Tensor:
    with tf.control_dependencies(tf.nest.flatten(after)), tf.device(host_of(device)):
        return tf.timestamp()


def _sample(x: tf.Tensor) -> tf.Tensor:
    """Return blocks from all over a tensor; all elements of a small tensor."""
    flat = tf.reshape(x, [-1])
    blocks = x.shape.num_elements() // BLOCK
    if blocks < 2 * _BLOCKS:
        return tf.cast(flat, tf.float32)
    rows = tf.reshape(flat[: blocks * BLOCK], [blocks, BLOCK])
    return tf.cast(tf.gather(rows, range(0, blocks, blocks // _BLOCKS)), tf.float32)


def _square(samples: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(tf.square(tf.cast(each, tf.float64))) for each in samples])


def _cost_of(ranks: int) -> Cost:
    cost = resolve("ring", ranks).cost
    assert cost is not None  # tfscale's own schedules state their cost
    return cost


def _described(load: Load, method: Switching, bound: float) -> deciding.Bucket:
    return deciding.Bucket(
        name=str(load.name),
        elements=sum(each.elements for each in load.described),
        methods=tuple(map(str, method.variants)),
        bytes=tuple(
            tuple(one.bytes for one in load.collectives if one.variant == (number,))
            for number in range(len(method.variants))
        ),
        bound=bound,
    )


def _step_of(row: Any) -> Step:
    numbers = [float(number) for number in row]
    seen = [
        Seen(start, end, int(method), lost, whole)
        for start, end, method, lost, whole in zip(*[iter(numbers[_OF_STEP:])] * _OF_BUCKET)
    ]
    return Step(numbers[0], (numbers[1], numbers[2]), tuple(seen))


def _to_keep(decider: Decider) -> np.ndarray:
    known = np.full([len(decider.buckets), WIDTH], np.nan, np.float32)
    for b, row in enumerate(known):
        row[0] = decider.current[b]
        row[1 : 1 + len(decider.computes[b])] = decider.computes[b]
        row[MOST + 2 : MOST + 2 + len(decider.errors[b])] = decider.errors[b]
    return known


def _recall(decider: Decider, known: np.ndarray) -> None:
    """Fill in the numbers of an earlier process, where this process has none of its own yet."""
    for b, row in enumerate(known):
        for mine, kept in ((decider.computes[b], row[1:]), (decider.errors[b], row[MOST + 2 :])):
            for method, number in enumerate(mine):
                if np.isnan(number):
                    mine[method] = float(kept[method])
