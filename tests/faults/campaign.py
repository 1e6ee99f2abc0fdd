"""Faults, drawn by a seed: trainings meet them, and are started again.

Each fault is a kind, at a moment, of one worker, under a schedule, a wire or a method, a rule for
when replicas agree, and a transport. What comes of it is good or bad:

- ended: the others soon ended with an error that names the worker, each with the exit code of that
  error; started again, the training ended as one that nothing has interrupted, to the bit. (Rules
  whose replicas never become equal are saved as their mean, and measured shares are never the same
  twice: then only all workers must be equal.)
- preempted: all saved and left; started again, the training began with what was saved. (If that
  was in the middle of an epoch, Keras begins it again, and the end is another.)
- survived: the training ended so at once.
- hung, misnamed, wrong: somebody never ended, or named another, or the trained state is another.
- late, crashed: somebody ended later than the docs promise, or with another exit code.

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
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests import warm
from tfscale.collectives import ALGORITHMS
from tfscale.collectives.wires import WIRES
from tfscale.launch import LocalWorkers

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "training.py"
SECONDS = 240  # a training takes 10 on a quiet machine
EPOCHS, STEPS = 3, 3  # of workers/training.py
EXIT_CODE, PREEMPTED = 3, 75  # likewise

# docs/faults.md promises at most 5 seconds; the machine may be busy.
PROMPT = 20.0
DEADLINE, JOIN_TIMEOUT = 20.0, 40.0  # of the strategy; both end waits that nothing else ends

# How the worker's process ends that meets a fault.
VICTIMS = {
    "kill": -signal.SIGKILL,
    "raise": 1,
    "exit": EXIT_CODE,
    "interrupt": -signal.SIGINT,
    "stop": -signal.SIGKILL,  # by this campaign, once the others have ended
    "term": -signal.SIGTERM,
    "pause": 0,
    "garbage": 0,
}
# What the others are told of it, once all have joined.
REASONS = {
    "raise": "its program failed: KeyError: 'no such row'",
    "exit": f"its program ended with exit code {EXIT_CODE}",
    "interrupt": "KeyboardInterrupt|it was interrupted",
    "term": "it got SIGTERM",
}
KINDS = tuple(VICTIMS)
MOMENTS = ("join", "start", "step", "validation", "save", "end")
SURVIVED = ("pause", "garbage")  # without an error
GOOD = ("ended", "preempted", "survived")

METHODS = ("PowerSGD(rank=1)", "TopK(0.25)")
EVERY_STEP = ""
RULES = (
    "LocalSGD(every=3)",
    "DiLoCo(every=3, wire='int8')",
    "ElasticAveraging(every=3)",
    "Gossip(every=1)",
    "BoundedStaleness(bound=2)",
)
SENDS_GRADIENTS = "BoundedStaleness"
UNEQUAL = ("ElasticAveraging", "Gossip")  # these replicas are saved as their mean
MEASURED = "'auto'"  # shares that follow times, so that sums are rounded in another way each time
# Arguments of ScaleStrategy for two workers, in Python; workers/training.py has the model.
GRIDS = {
    "stages": "grid=Grid(stages=2), pipeline=Pipeline(['down'], 3)",
    "late gradients": "grid=Grid(stages=2), pipeline=Pipeline(['down'], 3, 'zero_bubble')",
    "slices": "grid=Grid(tensor=2), tensor={'up': 'columns', 'down': 'rows'}",
    "shards of slices": "grid=Grid(tensor=2), tensor={'up': 'columns'}, shard='optimizer'",
    "parts": "shard='all'",
}
STATE = "state"  # any number of workers, and what they share is the optimizer's state
SHARED = {**GRIDS, STATE: "shard='optimizer'"}
HALVES = ("ring", "direct")  # schedules that have a reduce-scatter for any number of workers
TRANSPORTS = {
    "shared memory": {},
    "tcp": {"TFSCALE_SHARED_MEMORY": "0"},
    "grpc": {"TFSCALE_TRANSPORT": "grpc"},
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault that happens to a training.

    Args:
        kind: SIGKILL, an exception, ``sys.exit``, SIGINT, SIGSTOP for good, SIGTERM, SIGSTOP and
            SIGCONT later, or strangers who send garbage to the workers' ports.
        moment: when; for garbage from then on.
        victim: the worker.
        wire: a wire, or a method.
        sync: a rule; empty for every step.
        shares: the shares of the batch, in Python; empty if all are equal.
        grid: how workers share one model, or its state; empty if each has all of it.
        epoch: in which, for the moments that each epoch has.
        step: step of the epoch.
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
    sync: str = EVERY_STEP
    shares: str = ""
    grid: str = ""
    transport: str = "shared memory"
    epoch: int = 1
    step: int = 1
    delay: float = 0.002
    pause: float = 2.0
    double: bool = False

    def __str__(self) -> str:
        how = self.sync or self.wire
        if self.sync.startswith(SENDS_GRADIENTS):
            how = f"{self.sync} on {self.wire}"
        if self.grid:
            how = f"{self.grid} on {self.wire}"
        where = f"{self.schedule}, {how}, {self.transport}, {self.workers} workers"
        return f"{self.kind:10}{self.moment:11} of worker {self.victim}  {where}"

    @property
    def is_repeatable(self) -> bool:
        """Whether a training that is restarted, or repeated, ends with the same bits."""
        return not self.sync.startswith(UNEQUAL) and self.shares != MEASURED

    @property
    def patience(self) -> float:
        """Seconds after which the others have ended."""
        if self.moment == "join":
            return max(DEADLINE, JOIN_TIMEOUT) + PROMPT
        return PROMPT + (DEADLINE if self.kind == "stop" else 0)


def draw(seed: int, number: int, rules: Sequence[str] = (EVERY_STEP, EVERY_STEP, *RULES)) -> Fault:
    """A fault of a campaign, under one of these rules; the same each time."""
    dice = random.Random(f"{seed} {number}")
    workers = dice.choice((2, 2, 3))
    moment = dice.choice(MOMENTS)
    sync = dice.choice(rules)
    return Fault(
        kind=dice.choice(KINDS),
        moment=moment,
        victim=dice.randrange(workers),
        workers=workers,
        schedule=dice.choice(sorted(ALGORITHMS)),
        wire=dice.choice(_wires_of(sync)),
        sync=sync,
        transport=dice.choice(list(TRANSPORTS)),
        epoch=dice.randrange(EPOCHS),
        step=dice.randrange(STEPS),
        delay=dice.uniform(0, 1.5 if moment == "join" else 0.02),
        pause=dice.uniform(0.5, 8),
        double=dice.random() < 0.5,
    )


def in_a_grid(fault: Fault, number: int) -> Fault:
    """Return the fault of two workers that share one model, by the number of the fault."""
    grid = list(GRIDS)[number % len(GRIDS)]
    wire = fault.wire if fault.wire in WIRES and "shard" not in GRIDS[grid] else "fp32"
    schedule = fault.schedule if "optimizer" not in GRIDS[grid] else "ring"
    changed = {"workers": 2, "victim": fault.victim % 2, "wire": wire, "schedule": schedule}
    return dataclasses.replace(fault, grid=grid, sync=EVERY_STEP, **changed)


def with_shared_state(fault: Fault, number: int) -> Fault:
    """Return the fault of workers that share out the optimizer's state."""
    wire = fault.wire if fault.wire in WIRES else "fp32"
    schedule = HALVES[number % len(HALVES)]
    return dataclasses.replace(fault, grid=STATE, sync=EVERY_STEP, wire=wire, schedule=schedule)


def _wires_of(sync: str) -> Sequence[str]:
    """Return the wires and methods on which replicas may send gradients under a rule."""
    if sync == EVERY_STEP:
        return (*sorted(WIRES), *METHODS)
    return sorted(WIRES) if sync.startswith(SENDS_GRADIENTS) else ["fp32"]


@dataclasses.dataclass
class Told:
    """Output of a group of workers, with the manner and the time of each worker's end.

    Args:
        outputs: output of each worker.
        codes: exit codes, or minus the number of a signal; None of one that never ended.
        ends: when each ended, by the clock by which workers note times.
        garbage: how many strangers' connections a worker has accepted.
    """

    outputs: list[str]
    codes: list[int | None]
    ends: list[float]
    garbage: int = 0

    @property
    def hung(self) -> bool:
        """Whether a worker never ended."""
        return None in self.codes

    def of(self, word: str, worker: int) -> list[str]:
        """Return all lines of a worker that begin with a word."""
        return re.findall(rf"^{word}\b ?(.*)$", self.outputs[worker], re.MULTILINE)

    def all_of(self, word: str) -> list[str]:
        """Return all lines of all workers that begin with a word."""
        return [found for worker in range(len(self.outputs)) for found in self.of(word, worker)]

    def said(self) -> str:
        """The last words of all, for people to read."""
        return "\n".join(
            f"[worker {i}: {code}] {output[-1500:]}"
            for i, (code, output) in enumerate(zip(self.codes, self.outputs))
        )


def run(fault: Fault) -> tuple[str, str]:
    """Run a fault, and return its outcome, with a message."""
    with tempfile.TemporaryDirectory() as folder:
        met = _train(fault, folder, meets=True)
        outcome, why = judge_end(fault, met)
        if outcome not in ("ended", "preempted"):
            return outcome, why
        again = _train(fault, folder, meets=False)
        wrong = judge_restart(fault, met, again)
        if not wrong:
            return outcome, how_soon(fault, met)
        return "hung" if again.hung else "wrong", wrong


def how_soon(fault: Fault, met: Told) -> str:
    """Return when the last of the others was told of a fault."""
    (came,) = (float(time) for time in met.of("FAULT", fault.victim))
    others = [i for i in range(fault.workers) if i != fault.victim]
    times = [float(error.split()[0]) for i in others for error in met.of("ERROR", i)]
    return f"named after {max(times) - came:.1f} s" if times else ""


def judge_end(fault: Fault, met: Told) -> tuple[str, str]:
    """Return the outcome of a training that met a fault."""
    if not met.of("FAULT", fault.victim):
        return "wrong", f"the fault never came\n{met.said()}"
    if met.hung:
        return "hung", met.said()
    if fault.kind == "garbage" and not met.garbage:
        return "wrong", f"nobody has accepted a stranger's connection\n{met.said()}"
    if fault.kind in SURVIVED:
        return _judge_survival(fault, met)
    if fault.kind == "term" and met.all_of("PREEMPTED"):
        return _judge_preemption(fault, met)
    bad = next((bad for i in range(fault.workers) for bad in [_judge_worker(fault, met, i)] if bad),
               None)  # fmt: skip
    return bad or ("ended", "")


def _judge_survival(fault: Fault, met: Told) -> tuple[str, str]:
    ends, whole = met.all_of("END"), met.all_of("WHOLE")
    kinds = [{*ends, *whole}] if fault.is_repeatable else [{*ends}, {*whole}]
    if len(whole) < fault.workers or any(len(kind) != 1 for kind in kinds):
        return "wrong", met.said()
    return ("crashed", met.said()) if any(met.codes) else ("survived", "")


def _judge_preemption(fault: Fault, met: Told) -> tuple[str, str]:
    if len(met.all_of("PREEMPTED")) < fault.workers or len(set(met.all_of("PREEMPTED"))) != 1:
        return "wrong", f"not all have saved the same and left\n{met.said()}"
    if set(met.codes) != {PREEMPTED}:
        return "crashed", f"all ought to exit with {PREEMPTED}\n{met.said()}"
    return "preempted", ""


def _judge_worker(fault: Fault, met: Told, worker: int) -> tuple[str, str] | None:
    """Return a message if a worker ended in a wrong way, else None."""
    (came,) = (float(time) for time in met.of("FAULT", fault.victim))
    if worker == fault.victim:
        code, known = VICTIMS[fault.kind], came
        if fault.kind == "stop":
            known = met.ends[worker]
    elif errors := met.of("ERROR", worker):
        when, message = errors[0].split(" ", 1)
        if not _names(fault, message):
            return "misnamed", f"worker {worker} was told: {message}"
        code, known = 1, float(when)
    elif _was_ended_by_its_watch(fault, met.outputs[worker]):
        code, known = -signal.SIGKILL, met.ends[worker]
    elif met.of("END", worker):
        code, known = 0, met.ends[worker]
    else:
        return "wrong", f"worker {worker} has neither ended nor failed\n{met.said()}"
    if met.codes[worker] != code:
        return "crashed", f"worker {worker} ought to exit with {code}\n{met.said()}"
    since = max(came, *(float(word.split()[0]) for word in met.of("HERE", worker)))
    if worker != fault.victim and known > since + fault.patience:
        return "late", f"worker {worker} knew after {known - since:.1f} s\n{met.said()}"
    if met.ends[worker] > known + PROMPT:
        return "late", f"worker {worker} took {met.ends[worker] - known:.1f} s to end\n{met.said()}"
    return None


def _names(fault: Fault, message: str) -> bool:
    """Whether an error names the worker, and why it failed; while all join, there are no ranks."""
    who = f"worker {fault.victim} at"
    if fault.moment == "join":
        return who in message
    why = re.search(REASONS.get(fault.kind, ""), message)
    return f"rank {fault.victim} ({who}" in message and why is not None


def _was_ended_by_its_watch(fault: Fault, output: str) -> bool:
    """Whether the watch ended the worker; no Python code runs while TensorFlow's servers start."""
    return fault.moment == "join" and bool(
        re.search(rf"\(worker {fault.victim} at .*This process ends now \(join_timeout\)", output)
    )


def judge_restart(fault: Fault, met: Told, again: Told) -> str:
    """Return a message if the restarted training went wrong, else an empty one."""
    ends, whole = again.all_of("END"), again.all_of("WHOLE")
    if any(code != 0 for code in again.codes) or len(whole) < len(again.outputs):
        return f"started again, it did not end well\n{again.said()}"
    begun = [state.split() for state in again.all_of("STATE")]
    epochs = [int(epoch) for epoch in again.all_of("AT")]
    left = set(met.all_of("PREEMPTED"))
    if left and begun and {digest for _, digest in begun} != left:
        return f"it began with {begun}, and {left} was saved"
    if len(set(ends)) != 1 or len(set(whole)) != 1:
        return f"started again, workers ended with {ends}, uninterrupted with {whole}"
    same = {*ends, *whole, *met.all_of("END")}
    if any(int(steps) != epoch * STEPS for (steps, _), epoch in zip(begun, epochs, strict=False)):
        same = set(ends)  # Keras repeats the epoch, of which some steps were saved
    if not fault.is_repeatable:
        same = set(ends)
    if len(same) != 1:
        return f"started again, it ended with {ends}, uninterrupted with {whole}"
    saved, ended = met.of("SAVED", 0), met.all_of("ENDS")
    if saved and epochs and not ended and min(epochs) < int(saved[-1]):
        return f"it began with epoch {epochs}, though {saved[-1]} were saved"
    return ""


def _train(fault: Fault, folder: str, meets: bool) -> Told:
    """One start of all workers."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "SCHEDULE": fault.schedule,
        "WIRE": fault.wire,
        "SYNC": fault.sync,
        "SHARES": fault.shares,
        "GRID": SHARED.get(fault.grid, ""),
        "FOLDER": os.path.join(folder, "backup"),
        "PREEMPTION": "yes" if fault.kind == "term" else "",
        "FAULT": json.dumps(dataclasses.asdict(fault)) if meets else "",
        "WHOLE": "yes" if fault.kind in SURVIVED or not meets else "",
        "DEADLINE": str(DEADLINE),
        "JOIN_TIMEOUT": str(JOIN_TIMEOUT),
        **TRANSPORTS[fault.transport],
    }
    with warm.Workers([str(WORKER)], fault.workers, environment=environment) as group:
        stranger = _Stranger(fault, group) if meets else None
        codes, ends = _watch(fault, group, stranger)
        outputs = [group.output(i) for i in range(fault.workers)]
        return Told(outputs, codes, ends, stranger.heard if stranger else 0)


def _watch(
    fault: Fault, group: LocalWorkers, stranger: _Stranger | None
) -> tuple[list[int | None], list[float]]:
    """Return how and when each worker ended.

    A worker that failed is no reason to end the others.
    """
    codes: list[int | None] = [None] * fault.workers
    ends = [0.0] * fault.workers
    end = time.monotonic() + SECONDS
    looked = 0.0
    while None in codes and time.monotonic() < end:
        for i, process in enumerate(group.processes):
            if codes[i] is None and (code := process.poll()) is not None:
                codes[i], ends[i] = code, time.time()
        if stranger is not None and time.monotonic() > looked + 0.2:
            looked = time.monotonic()
            stranger.act([i for i, code in enumerate(codes) if code is None])
        time.sleep(0.02)
    return codes, ends


class _Stranger:
    """Does from outside what a fault needs, a few times a second."""

    def __init__(self, fault: Fault, group: LocalWorkers) -> None:
        self._fault = fault
        self._group = group
        self._since: float | None = None
        self._dice = random.Random(fault.delay)
        self.heard = 0  # how many connections were accepted

    def act(self, running: Sequence[int]) -> None:
        """Act if the fault has come.

        Args:
            running: the workers that have not ended.
        """
        if self._since is None and "\nFAULT" in self._group.output(self._fault.victim):
            self._since = time.monotonic()
        if self._since is None:
            return
        if self._fault.kind == "pause" and time.monotonic() > self._since + self._fault.pause:
            self._signal(signal.SIGCONT)
        if self._fault.kind == "stop" and running == [self._fault.victim]:
            self._signal(signal.SIGKILL)
        if self._fault.kind == "garbage":
            self._attack()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._group.signal(self._fault.victim, number)

    def _attack(self) -> None:
        for host, port in self._doors():
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
                socket.create_connection((host, port), timeout=1) as connection,
            ):
                self.heard += 1
                connection.sendall(words)

    def _doors(self) -> Iterator[tuple[str, int]]:
        """Return the addresses at which workers listen, for each other and for TensorFlow."""
        for process in self._group.processes:
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(process.pid).net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN:
                        host, port = one.laddr
                        yield "127.0.0.1" if host in ("0.0.0.0", "::") else host, port


def main() -> int:
    parser = argparse.ArgumentParser(description="faults, drawn by a seed")
    parser.add_argument("--n", type=int, default=30, help="how many")
    parser.add_argument("--first", type=int, default=0, help="leave out those before this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one of them, by its number")
    parser.add_argument("--sync", help="rules, such as LocalSGD(every=3);Gossip(every=1)")
    parser.add_argument(
        "--shares", default="", help="shares of the batch, in Python: {'worker:1': 0.5}, or 'auto'"
    )
    parser.add_argument("--grids", action="store_true", help="two workers share one model")
    parser.add_argument("--state", action="store_true", help="workers share the optimizer's state")
    given = parser.parse_args()
    how = {} if given.sync is None else {"rules": given.sync.split(";")}
    numbers = range(given.first, given.n) if given.only is None else [given.only]
    counts: collections.Counter[str] = collections.Counter()
    for number in numbers:
        fault, began = draw(given.seed, number, **how), time.monotonic()
        fault = dataclasses.replace(fault, shares=given.shares)
        fault = in_a_grid(fault, number) if given.grids else fault
        fault = with_shared_state(fault, number) if given.state else fault
        outcome, why = run(fault)
        counts[outcome] += 1
        took, soon = f"{time.monotonic() - began:.0f} s", why if outcome in GOOD else ""
        print(f"{number:4}  {fault!s:95} {outcome} ({took}) {soon}", flush=True)
        if outcome not in GOOD:
            print(f"      {why}", flush=True)
    print("\n" + ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    return 0 if set(counts) <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())
