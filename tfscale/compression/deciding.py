"""Decides by which method each bucket is summed: first by prices, then by live steps.

The decision is plain arithmetic in a fixed order: equal measurements give equal decisions on every
rank. It takes place at the end of each *window*, a few steps that all ranks have measured, and
prescribes how the next window runs. There are three kinds of windows:

- ``look`` measures the links, with the methods that are in use;
- ``trial`` sums some buckets by other methods, in turn with the methods in use;
- ``rest`` tries nothing. At its end, the decider checks whether the error is still within the
  bound, and whether times have changed.

Trials follow a look as long as the prices promise a gain, then rests. The rests have twice as many
steps as after the previous look, if that look has changed nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from tfscale.collectives.cost import Cost, Link

WINDOW = 16  # largest number of steps in a window
FIRST, LOOK, TRIAL = 6, 3, 16  # steps of the first look, of a later look and of a trial
_BLOCK = 4  # steps of a trial with the same methods; the first of these steps does not count
REST_SECONDS = 1.0  # shortest duration of a rest, as far as REST permits
REST = (3, WINDOW)  # smallest and largest number of steps
INTERVAL = (32, 512)  # smallest and largest number of steps between two looks

PAYS = 0.97  # a change pays if a step takes at most this share of its earlier time
_AS_FAST = 1.01  # times that differ by at most this factor are considered equal: that is noise
MOVED = 1.5  # if waiting times change by more than this factor, the links have changed
_NOISE = 2e-3  # seconds: shorter waiting times are noise
_FAR = 0.6  # share of a step's time: a proposal that promises a shorter time needs no turns
_CHECK = 0.05  # largest share of the time for checks whether the methods in use still pay
_LONGEST = 64.0  # most looks until an error beyond the bound is measured for the second time
_PER_NUMBER = 5e-10  # assumed seconds that a method computes for each number, if never tried

PROBES = (4_000, 2_000_000)  # sizes of the probes, in bytes


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Description of a bucket, before it is sent.

    Args:
        name: name for people.
        elements: number of elements.
        methods: names of the methods, the exact method first.
        bytes: sizes of the collectives of each method.
        bound: largest relative error.
    """

    name: str
    elements: int
    methods: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    bound: float


@dataclasses.dataclass(frozen=True)
class Seen:
    """Measurements of one bucket in one step on one rank.

    Args:
        start: time at which the gradients were ready.
        end: time at which the sums were ready.
        method: number of the method that summed the bucket.
        lost: square of what the method has lost.
        whole: square of what was to be sent.
    """

    start: float
    end: float
    method: int
    lost: float
    whole: float


@dataclasses.dataclass(frozen=True)
class Step:
    """Measurements of one step on one rank.

    Args:
        seconds: seconds since the previous step.
        probes: seconds that each of the two probes took.
        buckets: measurements of the buckets.
    """

    seconds: float
    probes: tuple[float, float]
    buckets: tuple[Seen, ...]

    @property
    def waited(self) -> float:
        """Exposed communication: seconds from the last ready gradients until all sums are ready."""
        return max(b.end for b in self.buckets) - max(b.start for b in self.buckets)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a bucket's method.

    Attributes:
        step: number of the optimizer's first update by the new method.
        bucket: name of the bucket.
        before, after: names of the methods.
        why: the reason, in words.
        time: time of the decision, in seconds of ``time.time()``.
    """

    step: int
    bucket: str
    before: str
    after: str
    why: str
    time: float


@dataclasses.dataclass(frozen=True)
class Window:
    """A plan for the next steps.

    Attributes:
        kind: ``"look"``, ``"trial"`` or ``"rest"``.
        methods: numbers of the buckets' methods for each step; None for the methods in use.
    """

    kind: str
    methods: tuple[tuple[int, ...] | None, ...]


def window(
    kind: str, steps: int, proposal: tuple[int, ...] | None = None, turns: bool = True
) -> Window:
    """Return a window with this number of steps.

    In a trial, the proposal takes turns with the methods in use, or, without ``turns``, has all
    steps.
    """
    if proposal is None:
        return Window(kind, (None,) * steps)
    tries = [not turns or step // _BLOCK % 2 == 1 for step in range(steps)]
    return Window(kind, tuple(proposal if one else None for one in tries))


_Waits = dict[tuple[int, int], tuple[int, int]]


class Decider:
    """State of the decisions for one optimizer: see the module.

    Args:
        buckets: buckets of the optimizer.
        cost: cost of an all-reduce among the ranks.

    Attributes:
        changes: all changes, in the order in which they were made.
        link: last measurement of the links.
        window: window that is running.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: Cost) -> None:
        self.buckets, self._cost = buckets, cost
        self.changes: list[Change] = []
        self.link: Link | None = None
        self.window = window("look", FIRST)
        self.current = [0] * len(buckets)
        # By bucket and method: seconds of computation, and errors; NaN if they are unknown.
        self.computes = [[math.nan] * len(b.methods) for b in buckets]
        self.errors = [[math.nan] * len(b.methods) for b in buckets]
        self._looks = 0
        # By bucket and method: the look before which the method is not tried again, and how often
        # the method has failed.
        self._too_slow: _Waits = {}
        self._too_wrong: _Waits = {}
        self._tried: set[tuple[int, int]] = set()  # buckets and methods since the last look
        self._interval, self._rested = INTERVAL[0], 0
        self._proposal: tuple[int, ...] = ()
        self._seconds = self._waited = math.nan  # of a step with the methods in use
        self._taken = [math.nan] * len(buckets)  # seconds that each bucket took
        self._changed = False
        self._now = 0.0
        self._unchecked = 0.0  # seconds since exact sums were tried

    # ------------------------------------------------------------------ windows

    def decide(self, ranks: Sequence[Sequence[Step]], current: Sequence[int], step: int) -> Window:
        """Return the next window.

        Args:
            ranks: each rank's measurements of the steps in the window that is over.
            current: numbers of the methods in use, which a checkpoint may have changed.
            step: number of the optimizer's updates so far.
        """
        self.current = [min(n, len(b.methods) - 1) for n, b in zip(current, self.buckets)]
        turns = [list(turn) for turn in zip(*ranks)]
        self._now = max((bucket.end for one in turns[-1] for bucket in one.buckets), default=0.0)
        self._unchecked += sum(max(one.seconds for one in turn) for turn in turns)
        self.window = self._after(turns, step)
        return self.window

    def _after(self, turns: list[list[Step]], step: int) -> Window:
        kind, usual = (
            self.window.kind,
            [t for t in turns if self._methods(t) == tuple(self.current)],
        )
        if kind == "trial":
            return self._judge(turns, step) or self._propose()
        if not usual:  # a checkpoint was restored during the window
            return window("look", LOOK)
        late = usual[len(usual) // 2 :] if kind == "look" else usual
        self._learn(late, kind == "look")
        if self._goes_back(step):
            self._waited = math.nan  # the next rest measures it
            return self._rest()
        if kind == "look":
            self._looks, self._tried = self._looks + 1, set()
            self._set_reference(late)
            return self._propose()
        self._rested += len(turns)
        is_due = self._rested >= self._interval or self._has_moved(late)
        return window("look", LOOK) if is_due else self._rest()

    def _propose(self) -> Window:
        """Return a trial of the cheapest methods, if they promise a faster step; else a rest.

        After enough time without a trial of exact sums, return such a trial instead of a rest.
        """
        cheapest = tuple(map(self._cheapest, range(len(self.buckets))))
        saved = min(self._saved(cheapest), self._waited)
        if cheapest != tuple(self.current) and saved > (1 - PAYS) * self._seconds:
            turns = self._seconds - saved > _FAR * self._seconds
            return self._trial(cheapest, TRIAL if turns else _BLOCK, turns)
        exact = tuple(0 if self._may(b, 0) else m for b, m in enumerate(self.current))
        costs = -self._saved(exact) * TRIAL / 2
        if exact != tuple(self.current) and costs < _CHECK * self._unchecked:
            self._unchecked = 0.0
            return self._trial(exact, TRIAL, True)  # do the methods in use still pay?
        self._interval = INTERVAL[0] if self._changed else min(2 * self._interval, INTERVAL[1])
        self._changed, self._rested = False, 0
        return self._rest()

    def _trial(self, proposal: tuple[int, ...], steps: int, turns: bool) -> Window:
        self._proposal = proposal
        return window("trial", steps, proposal, turns)

    def _saved(self, proposal: tuple[int, ...]) -> float:
        """Return the seconds that a proposal saves, if the backward pass hides no exchange."""
        return sum(
            self._taken[b] - self.price(b, method)
            for b, method in enumerate(proposal)
            if method != self.current[b]
        )

    def _rest(self) -> Window:
        steps = REST_SECONDS / max(self._seconds, 1e-6)
        return window("rest", round(min(max(steps, REST[0]), REST[1])))

    def _cheapest(self, bucket: int) -> int:
        allowed = [
            method
            for method in range(len(self.buckets[bucket].methods))
            if method == self.current[bucket] or self._may(bucket, method)
        ]
        return min(allowed, key=lambda method: (self.price(bucket, method), method))

    def _may(self, bucket: int, method: int) -> bool:
        """Return whether a method may be tried now."""
        key = (bucket, method)
        waits = any(
            self._looks < of.get(key, (0, 0))[0] for of in (self._too_slow, self._too_wrong)
        )
        return not (waits or key in self._tried)

    def _judge(self, turns: list[list[Step]], step: int) -> Window | None:
        """Accept the proposal, refuse it for some time, or return a longer trial of it."""
        counted = [t for n, t in enumerate(turns) if n % _BLOCK]
        tried = [t for t in counted if self._methods(t) == self._proposal]
        usual = [t for t in counted if self._methods(t) == tuple(self.current)]
        if not tried:
            return None
        self._learn(tried, False)
        then = _seconds(tried)
        now = _seconds(usual) if usual else self._seconds
        changed = [b for b, m in enumerate(self._proposal) if m != self.current[b]]
        wrong = [b for b in changed if self._error(b, self._proposal[b]) > self.buckets[b].bound]
        self._tried |= {(b, self._proposal[b]) for b in changed}
        for b in wrong:
            self._wait_for_error(b, self._proposal[b])
        if wrong:
            return None  # the next proposal leaves these methods out
        if not usual and _FAR * now < then <= PAYS * now:  # less gain than promised
            return self._trial(self._proposal, TRIAL, True)
        is_exact = not any(self._proposal[b] for b in changed)  # prefer exact sums if as fast
        if then > now * (_AS_FAST if is_exact else PAYS) or not (
            is_exact or _mostly_below(now, tried)
        ):
            for b in changed:
                self._wait(self._too_slow, b, self._proposal[b])
            if usual:
                self._seconds, self._waited = now, _waited(usual)
            return None
        for b in changed:
            error = self._error(b, self._proposal[b])
            said = f"a step takes {_ms(then)} instead of {_ms(now)} ms"
            said += f", with an error of {error:.2g}" if self._proposal[b] else ""
            said += f", over links of {self.gigabits:.2g} Gbit/s"
            self._change(b, self._proposal[b], step, said)
        self._set_reference(tried)
        return None

    def _goes_back(self, step: int) -> bool:
        """Switch to exact sums where the error exceeds the bound; return whether any did."""
        found = False
        for b, method in enumerate(self.current):
            error = self._error(b, method)
            if error > self.buckets[b].bound:
                self._wait_for_error(b, method)
                said = f"its error has grown to {error:.2g}, more than {self.buckets[b].bound:g}"
                self._change(b, 0, step, said)
                found = True
        return found

    def _change(self, bucket: int, method: int, step: int, why: str) -> None:
        of = self.buckets[bucket]
        before = of.methods[self.current[bucket]]
        self.changes.append(Change(step, of.name, before, of.methods[method], why, self._now))
        self.current[bucket], self._changed = method, True

    def _wait(self, of: _Waits, bucket: int, method: int, longer: float = 1.0) -> None:
        """Refuse a method for some looks, each time for twice as many as the last time."""
        _, times = of.get((bucket, method), (0, 0))
        of[bucket, method] = (self._looks + math.ceil(longer * 2**times), times + 1)

    def _wait_for_error(self, bucket: int, method: int) -> None:
        """Refuse a method whose error exceeds the bound: the larger the error, the longer."""
        longer = self._error(bucket, method) / self.buckets[bucket].bound
        self._wait(self._too_wrong, bucket, method, min(longer, _LONGEST))

    @property
    def gigabits(self) -> float:
        """Bandwidth of the links at the last measurement, in Gbit/s; NaN before the first."""
        return 8e-9 / self.link.beta if self.link else math.nan

    # ---------------------------------------------------------------- prices

    def price(self, bucket: int, method: int) -> float:
        """Return the seconds that a bucket should take by a method, over the measured links."""
        own = self.computes[bucket][method]
        if math.isnan(own):
            own = self._guess(bucket, method)
        return self.network(bucket, method) + own

    def network(self, bucket: int, method: int) -> float:
        """Return the seconds of communication, by the cost model."""
        if self.link is None:
            return 0.0
        return sum(self._cost.time(n, self.link) for n in self.buckets[bucket].bytes[method])

    def _guess(self, bucket: int, method: int) -> float:
        """Return an estimate of the seconds of computation.

        The estimate scales a known time of the same method for another bucket, if there is any.
        """
        name, elements = self.buckets[bucket].methods[method], self.buckets[bucket].elements
        for other, of in enumerate(self.buckets):
            if name in of.methods:
                known = self.computes[other][of.methods.index(name)]
                if not math.isnan(known):
                    return known * elements / max(1, of.elements)
        return _PER_NUMBER * elements if method else 0.0

    def _error(self, bucket: int, method: int) -> float:
        known = self.errors[bucket][method]
        return 0.0 if math.isnan(known) else known

    # ------------------------------------------------------------- learning

    def _learn(self, turns: list[list[Step]], look: bool) -> None:
        """Update the links, the methods' seconds of computation, and the methods' errors."""
        if look:
            times = [
                statistics.median(min(one.probes[p] for one in turn) for turn in turns)
                for p in range(2)
            ]
            before, self.link = self.link, _solve(self._cost, times)
            if before is not None and self._differs(before):
                self._interval, self._too_slow = INTERVAL[0], {}
        taken = self._of_buckets(turns)
        for b, method in enumerate(self._methods(turns[-1])):
            seen = [one.buckets[b] for turn in turns for one in turn]
            self.computes[b][method] = max(0.0, taken[b] - self.network(b, method))
            finite = [one for one in seen if math.isfinite(one.lost) and 0 < one.whole < math.inf]
            whole = sum(one.whole for one in finite)
            if whole > 0:
                self.errors[b][method] = math.sqrt(sum(one.lost for one in finite) / whole)

    def _differs(self, before: Link) -> bool:
        assert self.link is not None
        size = max(sum(b.bytes[0]) for b in self.buckets)
        now, then = (self._cost.time(size, link) for link in (self.link, before))
        return max(now, then) > MOVED * min(now, then)

    def _set_reference(self, turns: list[list[Step]]) -> None:
        self._seconds, self._waited = _seconds(turns), _waited(turns)
        self._taken = self._of_buckets(turns)

    def _has_moved(self, turns: list[list[Step]]) -> bool:
        if math.isnan(self._waited):
            self._set_reference(turns)
            return False
        now, then = _waited(turns) + _NOISE, self._waited + _NOISE
        return now > MOVED * then or now < then / MOVED

    def _of_buckets(self, turns: list[list[Step]]) -> list[float]:
        """Return the seconds of each bucket; buckets that overlap in time share the links."""
        shares = [_shares(turn) for turn in turns]
        return [statistics.median(each) for each in zip(*shares)]

    def _methods(self, turn: list[Step]) -> tuple[int, ...]:
        return tuple(one.method for one in turn[0].buckets)


def _shares(turn: list[Step]) -> list[float]:
    """Return the seconds of each bucket in one step.

    The time of the fastest rank counts: that rank came last, and did not wait for others. If
    buckets overlap, their times are scaled down to sum to the time of the whole exchange.
    """
    each = list(zip(*(step.buckets for step in turn)))
    alone = [min(one.end - one.start for one in bucket) for bucket in each]
    whole = min(
        max(one.end for one in step.buckets) - min(one.start for one in step.buckets)
        for step in turn
    )
    scale = min(1.0, whole / max(sum(alone), 1e-9))
    return [scale * one for one in alone]


def _seconds(turns: list[list[Step]]) -> float:
    return statistics.median(max(one.seconds for one in turn) for turn in turns)


def _mostly_below(limit: float, turns: list[list[Step]]) -> bool:
    """Return whether all but a sixth of the turns are below a limit.

    Chance alone seldom achieves this.
    """
    above = sum(max(one.seconds for one in turn) >= limit for turn in turns)
    return above <= len(turns) // 6


def _waited(turns: list[list[Step]]) -> float:
    return statistics.median(min(one.waited for one in turn) for turn in turns)


def _solve(cost: Cost, times: Sequence[float]) -> Link:
    """Return alpha and beta from the times of two sizes."""
    alphas = [cost.time(size, Link(1, 0)) for size in PROBES]
    betas = [cost.time(size, Link(0, 1)) for size in PROBES]
    beta = (times[1] / alphas[1] - times[0] / alphas[0]) / (
        betas[1] / alphas[1] - betas[0] / alphas[0]
    )
    beta = max(beta, 1e-13)
    return Link(max((times[0] - beta * betas[0]) / alphas[0], 0.0), beta)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
