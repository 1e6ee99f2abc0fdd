"""The choice of ``auto``: the schedule that is fastest by the cost model.

A choice can be written to a file, and a file that is read overrides the model. Everything here is
plain arithmetic in a fixed order: equal inputs give equal choices on every rank.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from pathlib import Path
from typing import Any

from tfscale.collectives.cost import Cluster, Link, Machine
from tfscale.collectives.hierarchical import hierarchical
from tfscale.collectives.proof import trusted
from tfscale.collectives.registry import ALGORITHMS, resolve
from tfscale.collectives.schedule import Schedule
from tfscale.support import records
from tfscale.support.records import Record

COST_MODEL = "cost model"
MEASURED = "measured"

_FLAT = ("ring", "tree", "halving", "direct")
_LARGEST = 1 << 40


@dataclasses.dataclass(frozen=True)
class Choice:
    """The schedule that is chosen for a bucket.

    Args:
        algorithm: name of the schedule, which ``Chooser.schedule`` makes.
        seconds: time of one all-reduce, predicted or measured.
        runner_up: the second best schedule, if there was a choice.
        runner_up_seconds: time of the second best schedule.
        why: ``"cost model"``, ``"measured"`` or ``"pinned by FILE"``.
    """

    algorithm: str
    seconds: float
    runner_up: str | None
    runner_up_seconds: float | None
    why: str


class Chooser:
    """A chooser of schedules, by the number of bytes.

    Args:
        machine: the links, as measured.
        gamma: seconds to add a byte from the wire (including its decoding).
        ranks: how many ranks take part.

    Attributes:
        lossless: the chooser for lossless bytes; None if this chooser is for them, or if the links
            were not measured on both wires.

    Example:
        >>> chooser = Chooser(Link(alpha=1e-3, beta=1e-9), gamma=1e-10, ranks=6)
        >>> chooser.choose(1_000).algorithm
        'tree'
        >>> chooser.choose(100_000_000).algorithm
        'direct'
    """

    def __init__(self, machine: Machine, gamma: float, ranks: int) -> None:
        if isinstance(machine, Cluster) and sum(machine.sizes) != ranks:
            raise ValueError(f"groups of {machine.sizes} are not {ranks} ranks")
        self.machine, self.gamma, self.ranks = machine, gamma, ranks
        self.lossless: Chooser | None = None
        self._candidates = _candidates(machine, ranks)
        self._single: dict[int, Choice] = {}  # by the exact number of bytes
        # rows of a file: smallest number of bytes, algorithm
        self._rows: list[tuple[int, str]] = []
        self._file: Path | None = None

    def choose(self, wire_bytes: int) -> Choice:
        """Return the schedule for a bucket of this number of bytes on its wire."""
        return self._single.get(wire_bytes) or self._general_choice(wire_bytes)

    def predicted(self, wire_bytes: int) -> float:
        """Return the smallest predicted time of a bucket of this number of bytes."""
        return self._predicted(wire_bytes).seconds

    def schedule(self, algorithm: str) -> Schedule:
        """Make the schedule that a choice names.

        Hierarchical schedules use the groups of the machine; ``"hierarchical/tree"`` uses a tree
        between the groups.
        """
        return self._candidates.get(algorithm) or resolve(algorithm, self.ranks)

    def decide(self, wire_bytes: int, choice: Choice) -> None:
        """Use this choice from now on for buckets of exactly this number of bytes.

        All ranks must decide the same before they choose again.
        """
        self._single[wire_bytes] = choice

    def ranges(self) -> list[tuple[int, Choice]]:
        """Return the ranges of sizes with one algorithm each: first size and choice."""
        octaves = {1 << power for power in range(_LARGEST.bit_length())}
        sizes = sorted(octaves.union(max(start, 1) for start, _ in self._rows))
        found = [(1, self._general_choice(1))]
        for low, high in itertools.pairwise(sizes):
            if self._general_choice(high).algorithm != self._general_choice(low).algorithm:
                start = self._first_change(low, high)
                found.append((start, self._general_choice(start)))
        return found

    def dump(self, path: str | Path) -> None:
        """Write the measurements and the choices, for people to read and edit.

        ``table`` has the algorithm from a number of bytes on, with the predicted time for that
        number. ``measured`` has the decisions of live steps for single numbers.
        """
        table = [{"from_bytes": start, **_as_row(choice)} for start, choice in self.ranges()]
        single = [{"bytes": n, **_as_row(choice)} for n, choice in sorted(self._single.items())]
        fields = {"ranks": self.ranks, **machine_fields(self.machine), "gamma": self.gamma}
        records.write(Path(path), {**fields, "table": table, "measured": single})

    @classmethod
    def load(cls, path: str | Path, ranks: int) -> Chooser:
        """Make a chooser that follows a file; for ``"auto"`` in the file, the cost model chooses.

        Args:
            path: the path of a file that ``dump`` wrote, perhaps edited.
            ranks: number of ranks, which the file must match.
        """
        file = Record.read(Path(path))
        file.only("ranks", *_MACHINE_KEYS, "gamma", "table", "measured")
        if file.integer("ranks") != ranks:
            raise file.wrong("ranks", f"{ranks}, the number of ranks that take part")
        machine = read_machine(file, ranks)
        chooser = cls(machine, file.number("gamma"), ranks)
        chooser._pin(file)
        return chooser

    def _general_choice(self, wire_bytes: int) -> Choice:
        """Return the choice for such sizes, without decisions for this size alone."""
        row = bisect.bisect_right(self._rows, wire_bytes, key=lambda row: row[0]) - 1
        name = self._rows[row][1] if row >= 0 else "auto"
        return self._predicted(wire_bytes) if name == "auto" else self._pinned(name, wire_bytes)

    def _predicted(self, wire_bytes: int) -> Choice:
        times = {name: self._seconds(name, wire_bytes) for name in self._candidates}
        # Ignore the last digits, which are rounding: the first of equal candidates wins.
        first, *others = sorted(times, key=lambda name: float(f"{times[name]:.9e}"))
        second = others[0] if others else None
        return Choice(first, times[first], second, times[second] if second else None, COST_MODEL)

    def _pinned(self, name: str, wire_bytes: int) -> Choice:
        seconds = self._seconds(name, wire_bytes)
        return Choice(name, seconds, None, None, f"pinned by {self._file}")

    def _seconds(self, name: str, wire_bytes: int) -> float:
        cost = self.schedule(name).cost
        assert cost is not None, f"{name} states no cost"
        return float(cost.time(wire_bytes, self.machine, self.gamma))

    def _first_change(self, low: int, high: int) -> int:
        before = self._general_choice(low).algorithm
        while high - low > 1:
            middle = (low + high) // 2
            if self._general_choice(middle).algorithm == before:
                low = middle
            else:
                high = middle
        return high

    def _pin(self, file: Record) -> None:
        self._file = file.path
        for row in file.records("table"):
            start = row.integer("from_bytes")
            if self._rows and start <= self._rows[-1][0]:
                raise row.wrong("from_bytes", f"more than the {self._rows[-1][0]} before it")
            self._rows.append((start, self._name_in(row, "from_bytes")))
        for row in file.records("measured") if "measured" in file else []:
            size, name = row.integer("bytes"), self._name_in(row, "bytes")
            choice = self._predicted(size) if name == "auto" else self._pinned(name, size)
            self._single[size] = choice

    def _name_in(self, row: Record, size: str) -> str:
        row.only(size, *(field.name for field in dataclasses.fields(Choice)))
        name = row.text("algorithm")
        known = dict.fromkeys(["auto", *self._candidates, *ALGORITHMS])
        if name not in known:
            raise row.wrong("algorithm", f"one of {', '.join(known)}")
        return name


def _candidates(machine: Machine, ranks: int) -> dict[str, Schedule]:
    """Return the schedules to choose from, without ``central``; earlier ones win ties."""
    if ranks <= 2:
        return {"ring": resolve("ring", ranks)}  # the others send the same messages
    found = {name: resolve(name, ranks) for name in _FLAT}
    if isinstance(machine, Cluster) and len(machine.sizes) > 1:
        found["hierarchical"] = trusted(hierarchical(machine.sizes))
        for name in _FLAT[1:] if len(machine.sizes) > 2 else ():
            between = hierarchical(machine.sizes, ALGORITHMS[name])
            found[f"hierarchical/{name}"] = trusted(between)
    return found


def _as_row(choice: Choice) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(choice).items() if value is not None}


_MACHINE_KEYS = ("link", "groups", "inner", "outer")


def machine_fields(machine: Machine) -> dict[str, Any]:
    """Return the fields of a machine for a file, which ``read_machine`` reads."""
    if isinstance(machine, Link):
        return {"link": dataclasses.asdict(machine)}
    links = {"inner": machine.inner, "outer": machine.outer}
    named = {name: dataclasses.asdict(link) for name, link in links.items()}
    return {"groups": list(machine.sizes), **named}


def read_machine(file: Record, ranks: int) -> Machine:
    """Return the machine that a file describes, for this number of ranks."""
    if "groups" not in file:
        return _read_link(file.record("link"))
    sizes = file.integers("groups")
    if not sizes or min(sizes) < 1:
        raise file.wrong("groups", "a size of 1 or more for each group")
    if sum(sizes) != ranks:
        raise file.wrong("groups", f"sizes that add up to {ranks} ranks")
    return Cluster(sizes, _read_link(file.record("inner")), _read_link(file.record("outer")))


def _read_link(fields: Record) -> Link:
    fields.only("alpha", "beta")
    return Link(fields.number("alpha"), fields.number("beta"))
