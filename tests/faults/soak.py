"""A long training: its processes must not hold more and more memory, descriptors or threads.

    python -m tests.faults.soak --minutes 30

What they hold in the last third is compared with what they held in the second; in the first,
TensorFlow's pools still grow.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from pathlib import Path

from tfscale.launch import LocalWorkers

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "soak.py"
GROWTH = 1.02  # of the memory; its median scatters by a percent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    seconds = 60 * arguments.minutes
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "SECONDS": str(seconds), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, str(WORKER)]
    with LocalWorkers(command, arguments.workers, environment=environment) as workers:
        outputs = workers.wait(seconds + 600)
    return 0 if all([steady(rank, output) for rank, output in enumerate(outputs)]) else 1


def steady(rank: int, output: str) -> bool:
    """Prints what a worker held, and tells whether that did not grow."""
    rows = [
        (float(when), int(memory), int(descriptors), int(threads))
        for when, memory, descriptors, threads in re.findall(
            r"^HELD (\S+) (\d+) (\d+) (\d+)$", output, re.MULTILINE
        )
    ]
    third = rows[-1][0] / 3
    before = [row for row in rows if third <= row[0] < 2 * third]
    after = [row for row in rows if row[0] >= 2 * third]
    memory = [statistics.median(row[1] for row in part) / 1e6 for part in (before, after)]
    # The fewest: the most depend on how busy the machine was.
    fewest = [[min(row[i] for row in part) for part in (before, after)] for i in (2, 3)]
    for when, held, descriptors, threads in rows[:: max(1, len(rows) // 12)]:
        print(f"{when:5.0f} s: {held / 1e6:.0f} MB, {descriptors} and {threads}")
    print(
        f"worker {rank}: {len(rows)} epochs in {rows[-1][0]:.0f} s; second third and last: "
        f"{memory[0]:.0f} and {memory[1]:.0f} MB, {fewest[0][0]} and {fewest[0][1]} descriptors, "
        f"{fewest[1][0]} and {fewest[1][1]} threads"
    )
    return memory[1] <= GROWTH * memory[0] and all(last <= first for first, last in fewest)


if __name__ == "__main__":
    sys.exit(main())
