"""Choice of a method, in trainings with invented times."""

import dataclasses
import random

import pytest

from tfscale.collectives.cost import Link
from tfscale.collectives.registry import resolve
from tfscale.compression import deciding
from tfscale.compression.deciding import Bucket, Decider, Seen, Step

NUMBERS = 25_000_000
METHODS = ("fp32", "bf16", "int8", "low rank")
BYTES = ((4 * NUMBERS,), (2 * NUMBERS,), (NUMBERS,), (80_000, 80_000))
COMPUTES = (0.02, 0.09, 0.12, 0.15)  # seconds
ERRORS = (0.0, 0.002, 0.007, 0.6)
COST = resolve("ring", 2).cost
SLOW, MIDDLE, FAST = (Link(1e-4, beta) for beta in (8e-8, 8e-9, 8e-10))
BACKWARD = 0.1  # seconds


@dataclasses.dataclass
class Training:
    """A model of one or more buckets on two ranks, over links that may change."""

    bound: float = 1.0
    buckets: int = 1
    noise: float = 0.05
    hidden: float = 0.0  # seconds of each bucket's exchange, by the backward pass
    link: Link = MIDDLE

    def __post_init__(self):
        sizes = tuple(tuple(n // self.buckets for n in each) for each in BYTES)
        described = [
            Bucket(f"bucket {b}", NUMBERS // self.buckets, METHODS, sizes, self.bound)
            for b in range(self.buckets)
        ]
        self.decider = Decider(described, COST)
        self.errors = list(ERRORS)
        self.random, self.current, self.window = random.Random(1), [0] * self.buckets, None
        self.step, self.clock = 0, 0.0
        self.ran = []  # methods and seconds of each step

    def about(self, seconds):
        return seconds * self.random.uniform(1 - self.noise, 1 + self.noise)

    def train(self, seconds):
        """Train for more seconds of the invented clock, and return the method in use."""
        end = self.clock + seconds
        while self.clock < end:
            window = self.window or self.decider.window
            rows = [self.take(window, methods or tuple(self.current)) for methods in window.methods]
            self.window = self.decider.decide([rows, rows], self.current, self.step)
            self.current = list(self.decider.current)
        return METHODS[self.current[0]]

    def take(self, window, methods):
        seen, waits = [], 0.0
        for bucket, method in zip(self.decider.buckets, methods):
            start = BACKWARD + waits
            network = sum(COST.time(n, self.link) for n in bucket.bytes[method])
            waits += self.about(network + COMPUTES[method] / self.buckets)
            seen.append(Seen(start, BACKWARD + waits, method, self.errors[method] ** 2, 1.0))
        seconds = self.about(BACKWARD) + max(0.0, waits - self.hidden)
        probes = [self.about(COST.time(n, self.link)) for n in deciding.PROBES]
        self.step, self.clock = self.step + 1, self.clock + seconds
        self.ran.append((methods, seconds))
        return Step(seconds, tuple(probes) if window.kind == "look" else (0.0, 0.0), tuple(seen))


def test_it_follows_the_links():
    """The decider also says why, and from which step on."""
    training = Training()
    assert training.train(100) == "low rank"
    training.link = SLOW
    assert training.train(100) == "low rank"
    training.link = FAST
    assert training.train(250) == "fp32"
    training.link = SLOW
    assert training.train(150) == "low rank"
    first, *_, last = training.decider.changes
    assert (first.bucket, first.before, first.after) == ("bucket 0", "fp32", "low rank")
    assert first.why.startswith("a step takes ") and "with an error of 0.6" in first.why
    assert first.why.endswith("Gbit/s")
    assert training.ran[first.step][0] == (3,) and training.ran[first.step - 9][0] == (0,)
    assert last.step < len(training.ran)


@pytest.mark.parametrize("bound, methods", [(0.001, {0}), (0.005, {0, 1}), (0.1, {0, 1, 2})])
def test_what_stays_is_within_the_bound(bound, methods):
    training = Training(bound, link=SLOW)
    training.train(1500)
    assert training.current[0] == max(methods)
    beyond = [seen for seen, _ in training.ran if seen[0] not in methods]
    # Their errors can only be known when they have been tried: seldom, and for four steps.
    assert len(beyond) <= 0.1 * len(training.ran)


def test_an_error_that_grows_beyond_the_bound_ends_it():
    training = Training(0.1)
    assert training.train(60) == "int8"
    training.errors[2] = 0.2
    training.train(5)
    last = training.decider.changes[-1]
    assert (last.before, last.after) != ("fp32", "int8") and training.current[0] != 2
    assert (
        "its error has grown to 0.2, more than 0.1"
        in [change for change in training.decider.changes if change.before == "int8"][-1].why
    )


def test_where_nothing_pays_nothing_changes():
    """The exchange is hidden behind the backward pass, so that no method makes steps faster."""
    training = Training(hidden=10.0, noise=0.02)
    training.train(300)
    assert training.current == [0] and not training.decider.changes
    usual = sum(1 for methods, _ in training.ran if methods == (0,))
    assert usual > 0.93 * len(training.ran)  # and it is looked after ever more seldom


def test_what_no_longer_pays_ends():
    """Though prices do not tell: a longer backward pass hides all of the exchange."""
    training = Training()
    training.train(60)
    assert training.current == [3]
    training.hidden = 10.0
    training.train(600)
    assert training.current == [0]


def test_noise_changes_little():
    training = Training(noise=0.3, link=FAST)
    training.train(400)
    assert len(training.decider.changes) <= 4
    mean = sum(seconds for _, seconds in training.ran) / len(training.ran)
    exact = [seconds for methods, seconds in training.ran if methods == (0,)]
    assert mean < 1.03 * sum(exact) / len(exact)


def test_many_buckets_change_together():
    training = Training(buckets=5)
    training.train(60)
    assert training.current == [3] * 5
    assert len({change.step for change in training.decider.changes[:5]}) == 1


def test_ranks_decide_alike():
    """Equal measurements give equal windows and equal changes, bit for bit."""
    first, second = Training(noise=0.4), Training(noise=0.4)
    for training in (first, second):
        training.train(60)
    assert first.ran == second.ran and first.decider.changes == second.decider.changes


def test_what_a_checkpoint_says_is_in_use():
    training = Training(link=FAST)
    training.train(30)
    assert training.current == [0]
    training.current = [3]  # restored
    training.train(400)
    assert training.current == [0]
    assert training.decider.changes[-1].after == "fp32"


def test_measurements_that_are_not_finite_say_nothing():
    training = Training(0.1, link=SLOW)
    training.errors = [0.0, float("nan"), float("inf"), float("nan")]
    training.train(500)
    assert training.decider.errors[0] == pytest.approx([0.0] * 1 + [float("nan")] * 3, nan_ok=True)


@pytest.mark.parametrize("overflows", [0, 1, 3])
def test_steps_that_overflow_do_not_count_in_an_error(overflows):
    """The residual stays as it was, so what was lost is finite, and what was to be sent is not."""
    bucket = Bucket("b", 1000, ("fp32", "int8"), ((4000,), (1000,)), 0.15)
    decider = Decider([bucket], resolve("ring", 2).cost)
    wholes = [1.0] + [float("inf")] * overflows
    steps = [Step(0.1, (0.0, 0.0), (Seen(0.0, 0.01, 1, 0.01, whole),)) for whole in wholes]
    decider._learn([[step] * 2 for step in steps], look=False)
    assert decider.errors[0][1] == pytest.approx(0.1)
