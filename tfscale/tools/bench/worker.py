"""Worker process of a benchmark: ``python -m tfscale.tools.bench.worker ASSIGNMENT``.

``TF_CONFIG`` holds the worker's rank. The worker measures tfscale's all-reduces and, in the
same rounds, TensorFlow's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import tensorflow as tf

from tfscale.native import Group, all_reduce, memory
from tfscale.native.transport import SHARED_MEMORY
from tfscale.tools.bench import measure, sockets
from tfscale.tools.bench.assignment import TRANSPORTS, Assignment, Contestant

DEADLINE = 60.0
SOCKET_SECONDS, SOCKET_ROUNDS = 0.3, 3


def main(path: str) -> None:
    """Make the measurements of an assignment, as one of its workers."""
    assignment = Assignment.load(path)
    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    with (Path(assignment.folder) / f"results-{rank}.jsonl").open("w") as out:

        def note(record: dict[str, Any]) -> None:
            print(json.dumps(record), file=out, flush=True)

        Worker(assignment, rank, note).run()
    measure.leave(assignment.folder, "worker", rank, assignment.processes)


class Worker:
    """Measurements of one process, which passes each result to ``note``."""

    def __init__(self, assignment: Assignment, rank: int, note: measure.Note) -> None:
        self.assignment, self.rank, self.note = assignment, rank, note
        memory.keep_memory()
        # Make the strategy first: later, it would invalidate the group's handles.
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.group = Group.cluster(deadline=DEADLINE, transport="grpc")
        wanted = {each.transport for each in assignment.contestants if not each.stock}
        self.groups = {name: _over(name, self.group) for name in TRANSPORTS if name in wanted}
        self.average = self.group.function(lambda c, v: all_reduce(v, c, reduction="mean"))

    def agree(self, mine: float) -> float:
        """Return the mean of all workers' numbers, after waiting for all workers."""
        (mean,) = self.average([tf.constant([mine], tf.float64)])
        return float(mean.numpy()[0])

    def run(self) -> None:
        """Measure all sizes of the assignment."""
        self.agree(0)
        if self.assignment.ports:
            rate = sockets.ring_rate(
                self.rank, self.assignment.ports, SOCKET_SECONDS, SOCKET_ROUNDS
            )
            self.note({"socket_rate": rate})
        for size in self.assignment.sizes:
            self._measure(size)

    def _measure(self, size: int) -> None:
        x = tf.constant(measure.numbers(self.rank, size))
        truth = measure.exact(self.assignment.processes, size) if self.rank == 0 else None
        functions = [self._function(each, x) for each in self.assignment.contestants]
        found: list[dict[str, Any]] = []
        for function in functions:
            result = function().numpy()
            found.append({"size": size, "digest": measure.digest(result)})
            if truth is not None:
                found[-1]["error"] = measure.error(result, truth)
        del truth

        def each_round(done: int, rounds: int) -> None:
            self.note({"size": size, "round": done, "of": rounds})

        turns = measure.Turns(self.agree, self.assignment.repeats, self.assignment.seconds)
        measured = turns.measure(functions, each_round)
        for index, record in enumerate(found):
            self.note({**record, "contestant": index, **measured[index]})

    def _function(self, contestant: Contestant, x: Any) -> Callable[[], Any]:
        if contestant.algorithm == "tf":
            return self._stock(x)
        if contestant.algorithm == "nothing":
            same = self.group.function(lambda communicator, value: tf.identity(value))
            return lambda: same([x])[0]
        reduce = self.groups[contestant.transport].function(
            lambda communicator, value: all_reduce(
                value,
                communicator,
                schedule=contestant.algorithm,
                wire=contestant.wire,
                piece_bytes=contestant.piece_bytes,
            )
        )
        return lambda: reduce([x])[0]

    def _stock(self, x: Any) -> Callable[[], Any]:
        """Return the all-reduce that Keras calls under MultiWorkerMirroredStrategy."""

        def replica(value: Any) -> Any:
            # Without identity, the value has no device that TensorFlow could reduce to.
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

        @tf.function(autograph=False)
        def reduce(value: Any) -> Any:
            return self.strategy.run(replica, (value,))

        return lambda: self.strategy.experimental_local_results(reduce(x))[0]


def _over(transport: str, group: Group) -> Group:
    """Return a group of the same ranks that uses another transport."""
    if transport == group.transport:
        return group
    shared = {SHARED_MEMORY: "0"} if transport == "tcp" else {}
    with mock.patch.dict(os.environ, shared):
        return group.part(range(group.ranks), transport="sockets")


if __name__ == "__main__":
    main(sys.argv[1])
