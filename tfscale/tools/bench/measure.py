"""Functions that every measuring process needs: make numbers, take turns, measure times.

This file is also a program: the worker for libraries other than TensorFlow
(``python measure.py gloo ASSIGNMENT before``; ``mpi`` or ``horovod`` in place of ``gloo``). It
needs numpy and torch, mpi4py or horovod. It does not import tfscale, so another interpreter can
run it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

WARM_UP = 2
LEAST_ROUNDS, MOST_ROUNDS = 5, 40
MOST_CALLS = 20

Agree = Callable[[float], float]  # average over all ranks; waits for all of them
Note = Callable[[dict[str, Any]], None]


def numbers(rank: int, size: int) -> Any:
    """Return the numbers that a rank contributes: normally distributed, like a gradient."""
    return np.random.default_rng([rank, size]).standard_normal(size, dtype=np.float32)


def in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round.

    All calls take turns. ``warm_up`` rounds without measurement come first.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up):
        for call in calls.values():
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def exact(ranks: int, size: int) -> Any:
    """Return the sum over all ranks in double precision."""
    total = np.zeros(size)
    for rank in range(ranks):
        total += numbers(rank, size)
    return total


def error(result: Any, truth: Any) -> float:
    """Return the largest error divided by the largest number; infinite if there is a NaN."""
    worst = float(np.max(np.abs(result - truth)))
    return worst / float(np.max(np.abs(truth))) if math.isfinite(worst) else math.inf


def page_faults() -> int:
    """Return the number of page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def context_switches() -> int:
    """Return how often threads of this process have left or lost their cores."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def digest(result: Any) -> str:
    """Return a hash of the bits of a result."""
    return hashlib.blake2b(memoryview(result).cast("B"), digest_size=8).hexdigest()


def meet(folder: str, name: str, rank: int, ranks: int) -> None:
    """Wait until all ranks have called this function, for at most a minute.

    When a collective ends on this rank, other ranks may still need this rank to finish theirs.
    """
    places = [os.path.join(folder, f"{name}-{each}.done") for each in range(ranks)]
    with open(places[rank], "w"):
        pass
    end = time.monotonic() + 60
    while not all(map(os.path.exists, places)) and time.monotonic() < end:
        time.sleep(0.01)


def leave(folder: str, name: str, rank: int, ranks: int) -> NoReturn:
    """End this process after all ranks have finished, without shutting libraries down.

    TensorFlow's threads and torch's threads can abort a process that ends in the usual way.
    """
    meet(folder, name, rank, ranks)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Turns:
    """Measurement of several functions in turn: A B C A B C.

    Every rank makes the same decisions, since these depend on averages over all ranks.

    Args:
        agree: returns the average of all ranks' numbers, on every rank.
        repeats: number of rounds; 0 means as many as fit in ``seconds``.
        seconds: approximate time to measure each function.
    """

    def __init__(self, agree: Agree, repeats: int, seconds: float) -> None:
        self.agree, self.repeats, self.seconds = agree, repeats, seconds

    def measure(
        self,
        functions: Sequence[Callable[[], object]],
        each_round: Callable[[int, int], None] = lambda done, rounds: None,
    ) -> list[dict[str, Any]]:
        """Return the results of each function.

        The results are ``times`` (seconds per call in each round), ``calls`` (calls per turn),
        ``processor`` (average processor seconds of this process per call), ``faults`` (its
        average page faults per call) and ``switches`` (its average context switches per call).
        """
        once = [self._once(function) for function in functions]
        turn = self.seconds / LEAST_ROUNDS
        calls = [min(MOST_CALLS, max(1, math.ceil(turn / seconds))) for seconds in once]
        longest = max(n * t for n, t in zip(calls, once, strict=True))
        rounds = self.repeats or self._fitting(longest)
        found: list[dict[str, Any]] = [
            {"times": [], "processor": 0.0, "faults": 0.0, "switches": 0.0, "calls": n}
            for n in calls
        ]
        for number in range(rounds):
            for function, mine in zip(functions, found, strict=True):
                self.agree(0)
                count, faults, switches = mine["calls"], page_faults(), context_switches()
                begin, start = time.process_time(), time.perf_counter()
                for _ in range(count):
                    function()
                mine["times"].append((time.perf_counter() - start) / count)
                mine["processor"] += (time.process_time() - begin) / count / rounds
                mine["faults"] += (page_faults() - faults) / count / rounds
                mine["switches"] += (context_switches() - switches) / count / rounds
            each_round(number + 1, rounds)
        return found

    def _once(self, function: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            function()
        self.agree(0)
        start = time.perf_counter()
        function()
        return max(1e-9, self.agree(time.perf_counter() - start))

    def _fitting(self, seconds: float) -> int:
        return min(MOST_ROUNDS, max(LEAST_ROUNDS, round(self.seconds / seconds)))


# ---------------------------------------------------------------------------
# All-reduces of other libraries.


def gloo(rank: int, ranks: int) -> tuple[Agree, Callable[[Any], Any]]:
    """Join torch.distributed; its environment variables hold the address of the meeting."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", rank=rank, world_size=ranks)

    def agree(mine: float) -> float:
        value = torch.tensor([mine], dtype=torch.float64)
        distributed.all_reduce(value)
        return float(value.item()) / ranks

    def prepare(x: Any) -> Callable[[], Any]:
        buffer = torch.from_numpy(x.copy())  # torch reduces in place

        def function() -> Any:
            distributed.all_reduce(buffer)
            return buffer.numpy()

        return function

    return agree, prepare


def mpi() -> tuple[int, Agree, Callable[[Any], Any]]:
    """Join MPI by mpi4py; mpirun sets the rank."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def agree(mine: float) -> float:
        return float(world.allreduce(mine) / world.size)

    def prepare(x: Any) -> Callable[[], Any]:
        y = np.empty_like(x)

        def function() -> Any:
            world.Allreduce(x, y)
            return y

        return function

    return world.rank, agree, prepare


def horovod() -> tuple[int, Agree, Callable[[Any], Any]]:
    """Start Horovod for TensorFlow; mpirun sets the rank."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()

    def agree(mine: float) -> float:
        value = tf.constant([mine], tf.float64)
        return float(hvd.allreduce(value, op=hvd.Average, name="agree")[0])

    def prepare(x: Any) -> Callable[[], Any]:
        tensor = tf.constant(x)

        @tf.function(autograph=False)
        def total() -> Any:
            return hvd.allreduce(tensor, op=hvd.Sum, name="total")

        return lambda: total().numpy()

    return hvd.rank(), agree, prepare


def main(library: str, path: str, part: str) -> None:
    """Measure all-reduces of another library (Gloo, MPI, Horovod), as one of its processes."""
    with open(path) as file:
        assignment = json.load(file)
    ranks = assignment["processes"]
    if library == "gloo":
        rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
        agree, prepare = gloo(rank, ranks)
    else:
        rank, agree, prepare = {"mpi": mpi, "horovod": horovod}[library]()
    turns = Turns(agree, assignment["repeats"], assignment["seconds"])
    with open(os.path.join(assignment["folder"], f"{library}-{part}-{rank}.jsonl"), "w") as out:
        for size in assignment["sizes"]:
            x = numbers(rank, size)
            first = prepare(x)()
            record = {"size": size, "digest": digest(first)}
            if rank == 0:
                record["error"] = error(first, exact(ranks, size))
            (measured,) = turns.measure([prepare(np.zeros_like(x))])
            print(json.dumps({**record, **measured}), file=out, flush=True)
    if library == "gloo":
        leave(assignment["folder"], f"{library}-{part}", rank, ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
