"""Assignment of the workers: what they measure. The parent sends it to them as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

STOCK = ("tf", "gloo", "mpi", "horovod", "nothing")  # contestants that are not tfscale's
IN_OUR_WORKERS = ("tf", "nothing")  # those of them that our workers measure, in turn with ours
TRANSPORTS = ("sockets", "tcp", "grpc")  # tcp: sockets without shared memory


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An implementation of all-reduce, with its settings.

    Args:
        algorithm: a name from ``tfscale.collectives.ALGORITHMS``, or one of ``STOCK``.
        wire: the format of the numbers that ranks send.
        piece_bytes: bytes of a message; 0 lets the engine choose.
        transport: one of ``TRANSPORTS``.
    """

    algorithm: str
    wire: str = "fp32"
    piece_bytes: int = 0
    transport: str = TRANSPORTS[0]

    @property
    def stock(self) -> bool:
        """Whether this all-reduce belongs to another library or to TensorFlow."""
        return self.algorithm in STOCK

    @property
    def label(self) -> str:
        """Name in tables."""
        if self.stock:
            return _STOCK_LABELS[self.algorithm]
        pieces = f" {self.piece_bytes >> 10} KiB" if self.piece_bytes else ""
        over = "" if self.transport == TRANSPORTS[0] else f" {self.transport}"
        return f"{self.algorithm} {self.wire}{pieces}{over}"


_STOCK_LABELS = {**{name: name for name in STOCK}, "tf": "tf stock", "nothing": "no exchange"}


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Measurements that one set of processes makes.

    Args:
        processes: number of processes that take part.
        sizes: counts of float32 numbers.
        contestants: all-reduces to measure, in the order of their turns.
        repeats: rounds for each size; 0 means as many as fit in ``seconds``.
        seconds: approximate time for each contestant at each size.
        folder: folder in which worker r writes ``results-r.jsonl``.
        ports: one address for each worker, to measure bare sockets with; may be empty.
    """

    processes: int
    sizes: tuple[int, ...]
    contestants: tuple[Contestant, ...]
    repeats: int
    seconds: float
    folder: str
    ports: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write this assignment to a file, which the workers read."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Assignment:
        """Read an assignment that ``save`` has written."""
        fields: dict[str, Any] = json.loads(Path(path).read_text())
        contestants = tuple(Contestant(**each) for each in fields.pop("contestants"))
        sizes, ports = tuple(fields.pop("sizes")), tuple(fields.pop("ports"))
        return cls(contestants=contestants, sizes=sizes, ports=ports, **fields)
