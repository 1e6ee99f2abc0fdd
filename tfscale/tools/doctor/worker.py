"""One process of doctor's all-reduce: ``python -m tfscale.tools.doctor.worker``.

``TF_CONFIG`` holds its place among the others. Worker 0 prints the results in one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tfscale.native import Group

MARK = "DOCTOR "
SIZES = (1_000, 1_000_000, 25_000_000)  # numbers of float32 values in the reported choices of auto

_ADDED = 1_000_000  # number of values whose sum is checked
_JOIN_SECONDS, _DEADLINE = 90, 30
_LAST = 1.0  # seconds by which worker 0 outlives the others


def main() -> NoReturn:
    """Run the all-reduces of one of doctor's workers."""
    # Use CPUs: only the links are measured, and several processes cannot share a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    from tfscale.native import Group

    group = Group.cluster(deadline=_DEADLINE, join_timeout=_JOIN_SECONDS)
    check_sum(group)
    found = measured(group)
    if group.communicators[0].rank == 0:
        print(MARK + json.dumps(found), flush=True)
        time.sleep(_LAST)  # TensorFlow ends all workers when its coordinator, this one, is gone
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # TensorFlow's threads may abort a process that ends normally


def check_sum(group: Group) -> None:
    """End this process unless all numbers of a sum are right."""
    import numpy as np
    import tensorflow as tf

    from tfscale.native import all_reduce

    numbers = np.arange(_ADDED, dtype=np.float32) % 100  # small numbers, whose sums are exact
    rank, ranks = group.communicators[0].rank, group.ranks
    (total,) = group.function(lambda c, x: all_reduce(x, c))([tf.constant(numbers * (rank + 1))])
    wrong = np.count_nonzero(total.numpy() != numbers * (ranks * (ranks + 1) // 2))
    if wrong:
        sys.exit(f"worker {rank} got a wrong sum: {wrong} of {_ADDED} numbers")


def measured(group: Group) -> dict[str, Any]:
    """Measure the links, and return them with the choices of ``auto``; equal on all workers."""
    from tfscale.collectives import Link, wires
    from tfscale.collectives.choose import Chooser
    from tfscale.exchange.link import measure
    from tfscale.exchange.team import Team

    link = measure(group)
    assert isinstance(link.machine, Link)  # each worker has one device
    chooser = Chooser(link.machine, link.gamma, group.ranks)
    choices = [(size, chooser.choose(wires.nbytes(wires.LOSSLESS, size))) for size in SIZES]
    return {
        "workers": group.ranks,
        "ways": Team(group, chooser).ways(),
        "why_not_sockets": group.communicators[0].why_not_sockets(),
        "latency_seconds": link.machine.alpha,
        # If beta is 0, the clock could not measure the time of sending.
        "bytes_per_second": 1 / link.machine.beta if link.machine.beta else None,
        "auto": [
            {"numbers": size, "algorithm": choice.algorithm, "seconds": choice.seconds}
            for size, choice in choices
        ],
        "sum_is_right": True,
    }


if __name__ == "__main__":
    main()
