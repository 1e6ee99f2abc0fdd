"""Print the programs that the native tests run, one rank a line.

    name goal ranks chunks rank kind peer first last kind peer first last ...

A route has its places first: how many chunks lie in x, and which; likewise in y.

    name route ranks chunks rank brings chunk ... gets chunk ... kind peer first last ...

``programs.h`` runs this script, so the tests see the schedules as they are now.
It needs nothing but Python itself.
"""

import itertools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tfscale.collectives import (
    ALGORITHMS,
    TOPOLOGIES,
    Schedule,
    all_gather,
    all_to_all,
    broadcast,
    direct,
    halving,
    hierarchical,
    mixture,
    mixtures,
    reduce_scatter,
    ring,
    transfer,
    tree,
)
from tfscale.collectives.route import places

RANKS = (*range(1, 10), 16)


def schedules() -> "dict[str, Schedule]":
    """Return the schedules to test, under names that fit into those of tests."""
    made = {f"{name}_{p}": ALGORITHMS[name](p) for name in ALGORITHMS for p in RANKS}
    made["groups_6"] = hierarchical([1, 3, 2])
    made["groups_9"] = hierarchical([2, 3, 4], tree)
    for p in RANKS:
        made[f"broadcast_{p}"] = broadcast(p)
    made["broadcast_from_last_5"] = broadcast(5, 4)
    for half, whole, p in itertools.product((reduce_scatter, all_gather), (ring, direct), RANKS):
        made[f"{half.__name__}_{whole.__name__}_{p}"] = half(whole(p))
    for name, p in itertools.product(TOPOLOGIES, RANKS):
        for turn, schedule in enumerate(mixtures(name, p)[:4]):
            made[f"gossip_{name}_{p}_{turn}"] = schedule
    made["gossip_star_5"] = mixture("star", 5, [(0, r) for r in range(1, 5)])
    for half, p in itertools.product((reduce_scatter, all_gather), (1, 2, 4, 8)):
        made[f"{half.__name__}_halving_{p}"] = half(halving(p))
    for p in RANKS:
        made[f"all_to_all_{p}"] = all_to_all(p)
    made["transfer_2"] = transfer(2, 0, 1)
    made["transfer_5"] = transfer(5, 3, 1)
    return made


def main() -> None:
    """Print all programs."""
    for name, schedule in schedules().items():
        for rank in range(schedule.ranks):
            flat = [int(number) for move in schedule.program(rank) for number in move]
            if schedule.goal == "route":
                flat = [
                    number for some in places(schedule, rank) for number in (len(some), *some)
                ] + flat
            print(name, schedule.goal, schedule.ranks, schedule.chunks, rank, *flat)


if __name__ == "__main__":
    main()
