"""Processes of one contestant, as the parent process of ``tfscale bench fit`` sees them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tfscale.tools.bench import holding
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.link import Network
from tfscale.tools.bench.run import MPI, QUIET, by_mpirun
from tfscale.tools.launch import LocalWorkers, WorkerFailed

_numbers = itertools.count()  # of crews, whose sockets may lie in one folder


def _prefixes(contestant: FitContestant, network: Network | None) -> list[list[str]]:
    """Return the words before the command of each process, if any."""
    words: list[list[str]] = [[] for _ in range(contestant.processes)]
    if contestant.held:  # first, since a network namespace has no folder of cgroups
        words = [holding.words_before(folder) for folder in contestant.held]
    if network:
        words = [[*before, *more] for before, more in zip(words, network.prefixes)]
    if contestant.pinned:
        cores = itertools.cycle(sorted(os.sched_getaffinity(0)))
        words = [[*before, "taskset", "-c", str(core)] for before, core in zip(words, cores)]
    return words


class Crew:
    """Worker processes of one contestant, which wait for their turns.

    Args:
        contestant: the training of these processes.
        network: network of these processes; None for the loopback.
        folder: folder for their Unix socket, which all network namespaces can reach by its path.
        timeout: seconds that the start, or any answer, may take.

    Attributes:
        parameters: number of parameters of the model.
    """

    def __init__(
        self, contestant: FitContestant, network: Network | None, folder: Path, timeout: float
    ) -> None:
        self.timeout = timeout
        address = str(folder / f"{next(_numbers)}.socket")
        text = json.dumps(dataclasses.asdict(contestant))
        shaped = network if contestant.processes > 1 else None
        alone = contestant.processes == 1 or contestant.way in ("apart", "horovod")
        command = [sys.executable, "-m", "tfscale.tools.bench.fit_worker", address, text]
        by_mpi = contestant.way == "horovod"
        if by_mpi:
            command = by_mpirun(command, contestant.processes)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            self.workers = LocalWorkers(
                command,
                1 if by_mpi else contestant.processes,
                hosts=shaped.hosts if shaped else None,
                prefixes=_prefixes(contestant, shaped),
                environment={
                    **QUIET,
                    **(MPI if by_mpi else {}),
                    **(shaped.environment if shaped else {}),
                    **({"TF_CONFIG": "{}"} if alone else {}),
                },
            )
            self.lines: list[Any] = []
            try:
                self._accept(server, contestant.processes)
                self.parameters = int(self._answers()[0]["parameters"])
            except BaseException:
                self.__exit__()
                raise

    def turn(self, steps: int) -> float:
        """Train for some steps and return the seconds per step of the slowest process."""
        return max(float(seconds) for seconds in self.ask(steps=steps))

    def ask(self, **order: int) -> list[Any]:
        """Send an order to all processes at once and return their answers."""
        try:
            for line in self.lines:
                print(json.dumps(order), file=line, flush=True)
        except BrokenPipeError:
            self._fail()
        return self._answers()

    def _accept(self, server: socket.socket, count: int) -> None:
        server.settimeout(0.2)
        end = time.monotonic() + self.timeout
        while len(self.lines) < count:
            try:
                line, _ = server.accept()
            except TimeoutError:
                if time.monotonic() > end or any(p.poll() for p in self.workers.processes):
                    self._fail()
                continue
            line.settimeout(self.timeout)
            self.lines.append(line.makefile("rw"))
            line.close()  # the file keeps it open

    def _answers(self) -> list[Any]:
        try:
            texts = [line.readline() for line in self.lines]
        except TimeoutError:
            texts = [""]
        if not all(texts):
            self._fail()
        return [json.loads(text) for text in texts]

    def _fail(self) -> None:
        time.sleep(1)  # a worker that has closed its socket may still be about to end
        dead = [i for i, process in enumerate(self.workers.processes) if process.poll()]
        self.workers.wait(0, only=dead or None)
        raise WorkerFailed("a worker of the benchmark left before its work was done")

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for line in self.lines:
            line.close()
        self.workers.__exit__()
