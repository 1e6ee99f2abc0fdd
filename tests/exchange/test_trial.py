"""Pick against runner-up on live steps: four logical devices, a loop by hand."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import group, integers, slowly

from tfscale.collectives import Link
from tfscale.collectives.choose import Chooser
from tfscale.exchange import trial
from tfscale.exchange.trial import TURNS, Trials
from tfscale.ops import all_reduce

RANKS = 4
SIZE = 4000  # bytes
DELAY = 0.1  # seconds, many times what an exchange takes even on a busy machine
SLOW_LINK = Link(alpha=2e-3, beta=1e-9)  # predicted: halving 8 ms, direct 12 ms


def chooser():
    made = Chooser(SLOW_LINK, 1e-10, RANKS)
    assert (made.choose(SIZE).algorithm, made.choose(SIZE).runner_up) == ("halving", "direct")
    return made


def exchange(trials, buckets=1, delayed=None, names="bucket"):
    """A step: its sums, and the name of the schedule by which each was made."""

    def body(communicator, x):
        def reduce(schedule, name):
            given = slowly(x, DELAY) if schedule.name == delayed else x
            y = all_reduce(given, communicator, schedule=schedule, name=name)
            return y, tf.constant(schedule.name)

        with trials.of_step(communicator) as trial:
            return [
                trial.run(lambda s, i=i: reduce(s, f"{names} {i}"), x, SIZE) for i in range(buckets)
            ]

    return group(RANKS).function(body)


def run(function, steps):
    """The schedules that ran, step by step; all ranks and sums are checked."""
    xs = integers(RANKS, SIZE // 4)
    told = []
    for _ in range(steps):
        results = function([tf.constant(x) for x in xs])
        for rank in results:
            for y, _ in rank:
                np.testing.assert_array_equal(y, sum(xs))
        names = [[name.numpy().decode() for _, name in rank] for rank in results]
        assert all(rank == names[0] for rank in names)
        told.append(names[0])
    return told


def has_choice(function):
    graph = function.get_concrete_function([tf.zeros([SIZE // 4])] * RANKS).graph
    return any(op.type in ("Case", "StatelessCase", "If") for op in graph.get_operations())


@pytest.mark.parametrize(("delayed", "winner"), [("halving", "direct"), ("direct", "halving")])
def test_both_take_turns_and_the_faster_stays(delayed, winner):
    made = chooser()
    trials = Trials(made)
    told = run(exchange(trials, delayed=delayed), TURNS + 4)
    assert told[:TURNS] == [["halving"], ["direct"]] * (TURNS // 2)
    assert told[TURNS:] == [[winner]] * 4
    assert made.choose(SIZE).why == "cost model"  # nobody has asked yet
    trials.tell_chooser()
    choice = made.choose(SIZE)
    assert (choice.algorithm, choice.runner_up, choice.why) == (winner, delayed, "measured")
    assert choice.runner_up_seconds >= DELAY
    assert 0 < choice.seconds < choice.runner_up_seconds


def test_several_buckets_in_a_loop_within_the_graph():
    """Run the loop as steps_per_execution does: Python does not see the steps."""
    made = chooser()
    trials = Trials(made)
    steps = 10

    def body(communicator, x):
        def step_of(i, total):
            with trials.of_step(communicator) as trial:
                sums = [
                    trial.run(
                        lambda s, n=n: all_reduce(x, communicator, schedule=s, name=f"loop {n}"),
                        x,
                        SIZE,
                    )
                    for n in range(3)
                ]
            return i + 1, total + tf.add_n(sums)

        return tf.while_loop(lambda i, _: i < steps, step_of, (tf.constant(0), tf.zeros_like(x)))[1]

    function = group(RANKS).function(body)
    xs = integers(RANKS, SIZE // 4)
    for call in range(4):
        trials.tell_chooser()
        assert made.choose(SIZE).why == ("measured" if call * steps >= TURNS else "cost model")
        for y in function([tf.constant(x) for x in xs]):
            np.testing.assert_array_equal(y, 3 * steps * sum(xs))


def test_what_was_decided_holds_for_functions_traced_later():
    made = chooser()
    trials = Trials(made)
    first = exchange(trials, delayed="halving")
    run(first, TURNS)
    second = exchange(trials, buckets=2, names="later")
    assert not has_choice(second)
    assert run(second, 2) == [["direct", "direct"]] * 2
    assert run(first, 2) == [["direct"]] * 2


def test_functions_traced_meanwhile_have_a_trial_of_their_own():
    trials = Trials(chooser())
    first, second = exchange(trials), exchange(trials, names="other")
    run(first, 3)
    assert run(second, 2) == [["halving"], ["direct"]]
    assert run(first, 1) == [["direct"]]


def test_without_anything_to_try_the_graph_has_no_choice(tmp_path, monkeypatch):
    made = chooser()
    assert has_choice(exchange(Trials(made)))
    assert not has_choice(exchange(Trials(made, enabled=False)))
    made.dump(tmp_path / "auto.json")
    assert not has_choice(exchange(Trials(Chooser.load(tmp_path / "auto.json", RANKS))))
    with monkeypatch.context() as patch:
        patch.setattr(trial, "NEAR", 1.4)  # the predictions are 1.5 apart
        assert not has_choice(exchange(Trials(made)))
    with monkeypatch.context() as patch:
        patch.setattr(trial, "WORTH_SECONDS", 1.0)
        assert not has_choice(exchange(Trials(made)))


def test_switched_off_it_takes_the_pick():
    assert run(exchange(Trials(chooser(), enabled=False), 2), 2) == [["halving"] * 2] * 2


def test_ranks_in_different_turns_are_refused():
    trials = Trials(chooser())
    function = exchange(trials)
    run(function, 2)
    trials._under_way[1]._running.assign([1])  # as after a step that failed on one rank alone
    with pytest.raises(tf.errors.InvalidArgumentError, match="ranks do not agree"):
        run(function, 1)


def test_eager_steps_and_trials_that_are_over_leave_nothing():
    trials = Trials(chooser())
    communicator = group(RANKS).communicators[0]
    for _ in range(3):
        with trials.of_step(communicator) as trial:
            trial.run(lambda schedule: schedule.name, tf.zeros([4]), SIZE)
    assert trials._under_way == []
    run(exchange(trials), TURNS + 1)
    trials.tell_chooser()
    assert trials._under_way == []
