"""Decides by which method each bucket is summed: prices first, and live steps then.

Plain arithmetic in a fixed order: equal measurements give equal decisions on every rank. It is
asked at the end of each *lap*, a few steps that all ranks have measured, and says how the next lap
is to run. There are three kinds of them:

- ``look``: the links are measured, with the methods that are in use;
- ``trial``: some buckets are summed otherwise, in turn with what is in use;
- ``rest``: nothing is tried. Whether the error is still within the bound, and whether times are
  as they were, is checked at the end of each.

A look is followed by trials as long as the prices promise anything, then by rests: twice as many
steps as after the look before, if that has changed nothing.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from tfscale.collectives.cost import Cost, Link

LAP = 16  # steps at most
FIRST, LOOK, TRIAL = 6, 3, 16
_BLOCK = 4  # steps of a trial with the same methods; the first of them does not count
REST_SECONDS = 1.0  # what a rest takes at least, as long as that is at most so many steps
REST = (3, LAP)
INTERVAL = (32, 512)  # steps between two looks, at least and at most

PAYS = 0.97  # of the time that a step took before: what takes longer is not worth a change
_AS_FAST = 1.01  # times: what takes so long is as fast, but for noise
MOVED = 1.5  # times: if steps wait so much longer or shorter, links have changed
_NOISE = 2e-3  # seconds of waiting, of which nothing can be said
_FAR = 0.6  # of a step's time: what is promised to be faster than that needs no turns
_CHECK = 0.05  # of the time may be spent on trying whether any method pays at all
_LONGEST = 64.0  # looks, until an error beyond the bound is measured for the second time
_PER_NUMBER = 5e-10  # seconds: what a method computes for each, before it has been tried

PROBES = (4_000, 2_000_000)  # bytes


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What is known of a bucket before it is sent.

    Args:
        name: for people.
        elements: how many numbers it has.
        methods: their names, the exact one first.
        bytes: of each method's collectives.
        bound: of its relative error.
    """

    name: str
    elements: int
    methods: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    bound: float


@dataclasses.dataclass(frozen=True)
class Seen:
    """One bucket in one step, as one rank saw it: when it was there and when it was summed, by
    which method, and the squares of what that has lost and of what was to be sent.
    """

    start: float
    end: float
    method: int
    lost: float
    whole: float


@dataclasses.dataclass(frozen=True)
class Step:
    """One step, as one rank saw it: seconds since the step before, and of the two probes."""

    seconds: float
    probes: tuple[float, float]
    buckets: tuple[Seen, ...]

    @property
    def waited(self) -> float:
        """From when the last gradients were there until all sums were: exposed communication."""
        return max(b.end for b in self.buckets) - max(b.start for b in self.buckets)


@dataclasses.dataclass(frozen=True)
class Change:
    """A bucket has another method.

    Attributes:
        step: the optimizer's first update by it.
        bucket: its name.
        before, after: the methods' names.
        why: the reason, in words.
        time: when it was decided, in seconds of ``time.time()``.
    """

    step: int
    bucket: str
    before: str
    after: str
    why: str
    time: float


@dataclasses.dataclass(frozen=True)
class Lap:
    """How the next steps are to run.

    Attributes:
        kind: ``"look"``, ``"trial"`` or ``"rest"``.
        methods: for each step the numbers of the buckets' methods; None for those in use.
    """

    kind: str
    methods: tuple[tuple[int, ...] | None, ...]


def lap(kind: str, steps: int, proposal: tuple[int, ...] | None = None, turns: bool = True) -> Lap:
    """So many steps; in a trial the proposal takes turns with what is in use, or has all."""
    if proposal is None:
        return Lap(kind, (None,) * steps)
    tries = [not turns or step // _BLOCK % 2 == 1 for step in range(steps)]
    return Lap(kind, tuple(proposal if one else None for one in tries))


_Waits = dict[tuple[int, int], tuple[int, int]]


class Decider:
    """See the module.

    Args:
        buckets: of one optimizer.
        cost: of an all-reduce among the ranks.

    Attributes:
        changes: all that were made, in their order.
        link: what was measured last.
        lap: the one that runs.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: Cost) -> None:
        self.buckets, self._cost = buckets, cost
        self.changes: list[Change] = []
        self.link: Link | None = None
        self.lap = lap("look", FIRST)
        self.current = [0] * len(buckets)
        # By bucket and method: seconds that it computes and errors, as far as they are known.
        self.computes = [[math.nan] * len(b.methods) for b in buckets]
        self.errors = [[math.nan] * len(b.methods) for b in buckets]
        self._looks = 0
        # By bucket and method: not to be tried before that look; how often that was said.
        self._too_slow: _Waits = {}
        self._too_wrong: _Waits = {}
        self._tried: set[tuple[int, int]] = set()  # since the last look
        self._interval, self._rested = INTERVAL[0], 0
        self._proposal: tuple[int, ...] = ()
        self._seconds = self._waited = math.nan  # of a step, by what is in use
        self._taken = [math.nan] * len(buckets)  # of each bucket
        self._changed = False
        self._now = 0.0
        self._unchecked = 0.0  # seconds since exact sums were tried

    # ------------------------------------------------------------------ laps

    def decide(self, ranks: Sequence[Sequence[Step]], current: Sequence[int], step: int) -> Lap:
        """The next lap.

        Args:
            ranks: the steps of the lap that is over, as each rank saw them.
            current: what is in use, which a checkpoint may have changed.
            step: the optimizer's updates so far.
        """
        self.current = [min(n, len(b.methods) - 1) for n, b in zip(current, self.buckets)]
        turns = [list(turn) for turn in zip(*ranks)]
        self._now = max((bucket.end for one in turns[-1] for bucket in one.buckets), default=0.0)
        self._unchecked += sum(max(one.seconds for one in turn) for turn in turns)
        self.lap = self._after(turns, step)
        return self.lap

    def _after(self, turns: list[list[Step]], step: int) -> Lap:
        kind, usual = self.lap.kind, [t for t in turns if self._methods(t) == tuple(self.current)]
        if kind == "trial":
            return self._judge(turns, step) or self._propose()
        if not usual:  # a checkpoint was restored meanwhile
            return lap("look", LOOK)
        late = usual[len(usual) // 2 :] if kind == "look" else usual
        self._learn(late, kind == "look")
        if self._goes_back(step):
            self._waited = math.nan  # the next rest says
            return self._rest()
        if kind == "look":
            self._looks, self._tried = self._looks + 1, set()
            self._set_reference(late)
            return self._propose()
        self._rested += len(turns)
        is_due = self._rested >= self._interval or self._has_moved(late)
        return lap("look", LOOK) if is_due else self._rest()

    def _propose(self) -> Lap:
        """The methods with the lowest prices, if these promise a faster step; else a rest."""
        cheapest = tuple(map(self._cheapest, range(len(self.buckets))))
        saved = min(self._saved(cheapest), self._waited)
        if cheapest != tuple(self.current) and saved > (1 - PAYS) * self._seconds:
            turns = self._seconds - saved > _FAR * self._seconds
            return self._trial(cheapest, TRIAL if turns else _BLOCK, turns)
        exact = tuple(0 if self._may(b, 0) else m for b, m in enumerate(self.current))
        costs = -self._saved(exact) * TRIAL / 2
        if exact != tuple(self.current) and costs < _CHECK * self._unchecked:
            self._unchecked = 0.0
            return self._trial(exact, TRIAL, True)  # does it still pay?
        self._interval = INTERVAL[0] if self._changed else min(2 * self._interval, INTERVAL[1])
        self._changed, self._rested = False, 0
        return self._rest()

    def _trial(self, proposal: tuple[int, ...], steps: int, turns: bool) -> Lap:
        self._proposal = proposal
        return lap("trial", steps, proposal, turns)

    def _saved(self, proposal: tuple[int, ...]) -> float:
        """Seconds, if nothing of the exchange is hidden behind the backward pass."""
        return sum(
            self._taken[b] - self.price(b, method)
            for b, method in enumerate(proposal)
            if method != self.current[b]
        )

    def _rest(self) -> Lap:
        steps = REST_SECONDS / max(self._seconds, 1e-6)
        return lap("rest", round(min(max(steps, REST[0]), REST[1])))

    def _cheapest(self, bucket: int) -> int:
        allowed = [
            method
            for method in range(len(self.buckets[bucket].methods))
            if method == self.current[bucket] or self._may(bucket, method)
        ]
        return min(allowed, key=lambda method: (self.price(bucket, method), method))

    def _may(self, bucket: int, method: int) -> bool:
        """Whether it may be tried now."""
        key = (bucket, method)
        waits = any(
            self._looks < of.get(key, (0, 0))[0] for of in (self._too_slow, self._too_wrong)
        )
        return not (waits or key in self._tried)

    def _judge(self, turns: list[list[Step]], step: int) -> Lap | None:
        """Take the proposal, or not for some time; or look closer."""
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
            return None  # the others are tried without them
        if not usual and _FAR * now < then <= PAYS * now:  # not as far apart as it was promised
            return self._trial(self._proposal, TRIAL, True)
        is_exact = not any(self._proposal[b] for b in changed)  # what is not needed is left out
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
        """To exact sums, where the error has grown beyond the bound."""
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
        """Each time twice as many looks as the time before."""
        _, times = of.get((bucket, method), (0, 0))
        of[bucket, method] = (self._looks + math.ceil(longer * 2**times), times + 1)

    def _wait_for_error(self, bucket: int, method: int) -> None:
        """The longer, the farther it is beyond the bound."""
        longer = self._error(bucket, method) / self.buckets[bucket].bound
        self._wait(self._too_wrong, bucket, method, min(longer, _LONGEST))

    @property
    def gigabits(self) -> float:
        """A second, over the links as they were measured last."""
        return 8e-9 / self.link.beta if self.link else math.nan

    # ---------------------------------------------------------------- prices

    def price(self, bucket: int, method: int) -> float:
        """Seconds that the bucket should take by the method, over the links as they are."""
        own = self.computes[bucket][method]
        if math.isnan(own):
            own = self._guess(bucket, method)
        return self.network(bucket, method) + own

    def network(self, bucket: int, method: int) -> float:
        """By the cost model."""
        if self.link is None:
            return 0.0
        return sum(self._cost.time(n, self.link) for n in self.buckets[bucket].bytes[method])

    def _guess(self, bucket: int, method: int) -> float:
        """By what the same method computes for other buckets, if that is known."""
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
        """Links, what methods compute, and their errors."""
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
            finite = [one for one in seen if math.isfinite(one.lost) and one.whole > 0]
            whole = sum(one.whole for one in finite if math.isfinite(one.whole))
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
        """Seconds of each; those that were under way at the same time have shared the links."""
        shares = [_shares(turn) for turn in turns]
        return [statistics.median(each) for each in zip(*shares)]

    def _methods(self, turn: list[Step]) -> tuple[int, ...]:
        return tuple(one.method for one in turn[0].buckets)


def _shares(turn: list[Step]) -> list[float]:
    """The rank that was there last did not wait for others: its time counts."""
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
    """But for one of so many as have taken turns, so that chance alone seldom does it."""
    above = sum(max(one.seconds for one in turn) >= limit for turn in turns)
    return above <= len(turns) // 6


def _waited(turns: list[list[Step]]) -> float:
    return statistics.median(min(one.waited for one in turn) for turn in turns)


def _solve(cost: Cost, times: Sequence[float]) -> Link:
    """Alpha and beta from two sizes."""
    alphas = [cost.time(size, Link(1, 0)) for size in PROBES]
    betas = [cost.time(size, Link(0, 1)) for size in PROBES]
    beta = (times[1] / alphas[1] - times[0] / alphas[0]) / (
        betas[1] / alphas[1] - betas[0] / alphas[0]
    )
    beta = max(beta, 1e-13)
    return Link(max((times[0] - beta * betas[0]) / alphas[0], 0.0), beta)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
