"""Faults, drawn by a seed: trainings meet them, and are started again.

Each fault is a kind, at a moment, of one worker, under a schedule and a wire. What comes of it is
good or bad:

- ended: the others ended with an error that names the worker; started again, the training ended
  as one that nothing has interrupted, to the bit.
- preempted: all saved and left; started again, the training began with what was saved. (If that
  was in the middle of an epoch, Keras begins it again, and the end is another.)
- survived: the training ended so at once.
- hung, misnamed, wrong: somebody never ended, or named another, or the trained state is another.

    python -m tests.faults.campaign --n 200 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests import warm
from tfscale.collectives import ALGORITHMS
from tfscale.launch import LocalWorkers, WorkerFailed
from tfscale.wires import WIRES

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "training.py"
SECONDS = 300  # a training takes 10 on a quiet machine, and its deadline is 60
EPOCHS, STEPS = 3, 3  # of workers/training.py

KINDS = ("kill", "raise", "pause", "term", "garbage")
MOMENTS = ("start", "step", "validation", "save", "end")
GOOD = ("ended", "preempted", "survived")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a training.

    Args:
        kind: SIGKILL, an exception, SIGSTOP and SIGCONT later, SIGTERM, or strangers who send
            garbage to the workers' ports.
        moment: when; for garbage from then on.
        victim: the worker.
        epoch: in which, for the moments that each epoch has.
        step: of the epoch.
        delay: seconds from the moment on, so that it is under way.
        pause: seconds until SIGCONT.
        double: whether the backup before the last one is kept.
    """

    kind: str
    moment: str
    victim: int
    workers: int
    schedule: str
    wire: str
    epoch: int = 1
    step: int = 1
    delay: float = 0.002
    pause: float = 2.0
    double: bool = False

    def __str__(self) -> str:
        where = f"{self.schedule}, {self.wire}, {self.workers} workers"
        return f"{self.kind:8}{self.moment:11} of worker {self.victim}  {where}"


def draw(seed: int, number: int) -> Fault:
    """A fault of a campaign; the same each time."""
    dice = random.Random(f"{seed} {number}")
    workers = dice.choice((2, 2, 3))
    return Fault(
        kind=dice.choice(KINDS),
        moment=dice.choice(MOMENTS),
        victim=dice.randrange(workers),
        workers=workers,
        schedule=dice.choice(sorted(ALGORITHMS)),
        wire=dice.choice(sorted(WIRES)),
        epoch=dice.randrange(EPOCHS),
        step=dice.randrange(STEPS),
        delay=dice.uniform(0, 0.02),
        pause=dice.uniform(0.5, 8),
        double=dice.random() < 0.5,
    )


@dataclasses.dataclass
class Told:
    """What a group of workers printed, and whether one never ended."""

    outputs: list[str]
    hung: bool = False

    def of(self, word: str, worker: int) -> list[str]:
        """What a worker said under a word, each time."""
        return re.findall(rf"^{word}\b ?(.*)$", self.outputs[worker], re.MULTILINE)

    def all_of(self, word: str) -> list[str]:
        return [found for worker in range(len(self.outputs)) for found in self.of(word, worker)]


def run(fault: Fault) -> tuple[str, str]:
    """What came of a fault: the outcome, and what was said if it is a bad one."""
    with tempfile.TemporaryDirectory() as folder:
        met = _train(fault, folder, meets=True)
        outcome, why = judge_end(fault, met)
        if outcome not in ("ended", "preempted"):
            return outcome, why
        again = _train(fault, folder, meets=False)
        wrong = judge_restart(met, again)
        return (outcome, "") if not wrong else ("hung" if again.hung else "wrong", wrong)


def judge_end(fault: Fault, met: Told) -> tuple[str, str]:
    """How a training ended that met a fault."""
    said = "\n".join(output[-1500:] for output in met.outputs)
    if not met.all_of("FAULT") and fault.kind != "garbage":
        return "wrong", f"the fault never came\n{said}"
    if met.hung:
        return "hung", said
    others = [i for i in range(fault.workers) if i != fault.victim]
    if fault.kind in ("pause", "garbage"):
        ends = {*met.all_of("END"), *met.all_of("WHOLE")}
        whole = len(met.all_of("WHOLE")) == fault.workers and len(ends) == 1
        return ("survived", "") if whole else ("wrong", said)
    if fault.kind == "term" and len(met.all_of("PREEMPTED")) == fault.workers:
        return "preempted", ""
    for other in others:
        errors = met.of("ERROR", other)
        if errors and f"rank {fault.victim} (worker {fault.victim} at" not in errors[0]:
            return "misnamed", f"worker {other} was told: {errors[0]}"
        if not errors and not met.of("END", other):
            return "wrong", said
    return "ended", ""


def judge_restart(met: Told, again: Told) -> str:
    """What is wrong with a training that was started again, or nothing."""
    said = "\n".join(output[-1500:] for output in again.outputs)
    ends, whole = again.all_of("END"), again.all_of("WHOLE")
    if again.hung or len(whole) < len(again.outputs):
        return f"started again, it did not end\n{said}"
    begun = [state.split() for state in again.all_of("STATE")]
    epochs = [int(epoch) for epoch in again.all_of("AT")]
    left = set(met.all_of("PREEMPTED"))
    if left and begun and {digest for _, digest in begun} != left:
        return f"it began with {begun}, and {left} was saved"
    same = {*ends, *whole, *met.all_of("END")}
    if any(int(steps) != epoch * STEPS for (steps, _), epoch in zip(begun, epochs, strict=False)):
        same = set(ends)  # Keras repeats the epoch, of which some steps were saved
    if len(same) != 1:
        return f"started again, it ended with {ends}, uninterrupted with {whole}"
    saved, ended = met.of("SAVED", 0), met.all_of("ENDS")
    if saved and epochs and not ended and min(epochs) < int(saved[-1]):
        return f"it began with epoch {epochs}, though {saved[-1]} were saved"
    return ""


def _train(fault: Fault, folder: str, meets: bool) -> Told:
    """One start of all workers."""
    survives = fault.kind in ("pause", "garbage")
    environment = {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "SCHEDULE": fault.schedule,
        "WIRE": fault.wire,
        "FOLDER": os.path.join(folder, "backup"),
        "MEETING": tempfile.mkdtemp(dir=folder),
        "PREEMPTION": "yes" if fault.kind == "term" else "",
        "FAULT": json.dumps(dataclasses.asdict(fault)) if meets else "",
        "WHOLE": "yes" if survives or not meets else "",
    }
    with warm.Workers([str(WORKER)], fault.workers, environment=environment) as group:
        stranger = _Stranger(fault, group, meets)
        end = time.monotonic() + SECONDS
        hung = False
        for i in range(fault.workers):  # a worker that failed is no reason to end the others
            try:
                group.wait(max(1, end - time.monotonic()), only=[i], watch=stranger)
            except WorkerFailed:
                hung |= group.processes[i].poll() is None
        return Told([group.output(i) for i in range(fault.workers)], hung)


class _Stranger:
    """Does from outside what a fault needs, a few times a second."""

    def __init__(self, fault: Fault, group: LocalWorkers, meets: bool) -> None:
        self._fault = fault
        self._group = group
        self._act = (
            {"pause": self._wake, "garbage": self._attack}.get(fault.kind) if meets else None
        )
        self._since: float | None = None
        self._dice = random.Random(fault.delay)

    def __call__(self) -> None:
        if self._act is None:
            return
        output = self._group.output(self._fault.victim)
        if self._since is None and "\nFAULT" in output:
            self._since = time.monotonic()
        if self._since is not None:
            self._act()

    def _wake(self) -> None:
        assert self._since is not None
        if time.monotonic() > self._since + self._fault.pause:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._group.signal(self._fault.victim, signal.SIGCONT)

    def _attack(self) -> None:
        for i in range(self._fault.workers):
            (address,) = re.findall(r"^HERE (.*)$", self._group.output(i), re.MULTILINE)[:1]
            host, port = address.split(":")
            words = self._dice.choice(
                (
                    self._dice.randbytes(1000),
                    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self._dice.randbytes(500),
                    b"",
                )
            )
            with (
                contextlib.suppress(OSError),  # hung up on, as it should be
                socket.create_connection((host, int(port)), timeout=1) as connection,
            ):
                connection.sendall(words)


def main() -> int:
    parser = argparse.ArgumentParser(description="faults, drawn by a seed")
    parser.add_argument("--n", type=int, default=30, help="how many")
    parser.add_argument("--first", type=int, default=0, help="leave out those before this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one of them, by its number")
    given = parser.parse_args()
    numbers = range(given.first, given.n) if given.only is None else [given.only]
    counts: collections.Counter[str] = collections.Counter()
    for number in numbers:
        fault, began = draw(given.seed, number), time.monotonic()
        outcome, why = run(fault)
        counts[outcome] += 1
        print(f"{number:4}  {fault!s:75} {outcome} ({time.monotonic() - began:.0f} s)", flush=True)
        if outcome not in GOOD:
            print(f"      {why}", flush=True)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return 0 if set(counts) <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())
