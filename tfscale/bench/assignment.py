"""What is to be measured; it travels to the workers as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

STOCK = ("tf", "gloo", "mpi", "horovod")  # contestants that are not ours
TRANSPORTS = ("sockets", "tcp", "grpc")  # tcp: sockets without shared memory


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to do an all-reduce.

    Args:
        algorithm: a name from ``tfscale.collectives.ALGORITHMS``, or one of ``STOCK``.
        wire: the format that travels.
        piece_bytes: the size of a message; 0 lets the engine choose.
        transport: one of ``TRANSPORTS``.
    """

    algorithm: str
    wire: str = "fp32"
    piece_bytes: int = 0
    transport: str = TRANSPORTS[0]

    @property
    def stock(self) -> bool:
        """Whether it is another library, or TensorFlow's own."""
        return self.algorithm in STOCK

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.stock:
            return _STOCK_LABELS[self.algorithm]
        pieces = f" {self.piece_bytes >> 10} KiB" if self.piece_bytes else ""
        over = "" if self.transport == TRANSPORTS[0] else f" {self.transport}"
        return f"{self.algorithm} {self.wire}{pieces}{over}"


_STOCK_LABELS = {"tf": "tf stock", **{name: name for name in STOCK[1:]}}


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What one set of processes measures.

    Args:
        processes: how many take part.
        sizes: counts of float32 numbers.
        contestants: in the order in which they take turns.
        repeats: rounds for each size; 0 stops after about ``seconds``.
        seconds: how long to measure each contestant at each size, about.
        folder: where worker r writes ``results-r.jsonl``.
        ports: an address for each worker, for the measurement of bare sockets.
    """

    processes: int
    sizes: tuple[int, ...]
    contestants: tuple[Contestant, ...]
    repeats: int
    seconds: float
    folder: str
    ports: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Writes it to a file, for workers."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Assignment:
        """Reads what ``save`` has written."""
        fields: dict[str, Any] = json.loads(Path(path).read_text())
        contestants = tuple(Contestant(**each) for each in fields.pop("contestants"))
        sizes, ports = tuple(fields.pop("sizes")), tuple(fields.pop("ports"))
        return cls(contestants=contestants, sizes=sizes, ports=ports, **fields)
