"""Gossip: each rank gets a mixture of its own and a few others' values, instead of a sum.

In a round of gossip each rank s sends its value to :math:`d_s` others. It keeps, and gives to each
of these, an equal share of :math:`1 / (d_s + 1)`, so nothing is lost: the columns of the matrix of
shares sum to 1. If its rows do, too, the matrix is doubly stochastic, and each rank gets a mean. A
topology is a list of such rounds, which take turns.
"""

from __future__ import annotations

import itertools
import operator
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from tfscale.collectives.cost import Cost, Link, fan_in, flat
from tfscale.collectives.moves import Kind, Move, ScheduleError, add, finalise, send
from tfscale.collectives.programs import checked_ranks
from tfscale.collectives.proof import trusted
from tfscale.collectives.schedule import Schedule, checked_schedule
from tfscale.support import arguments

Pairs = Sequence[tuple[int, int]]  # each sender with its receiver
Topology = Callable[[int], Sequence[Pairs]]

_ROUNDING = 1e-12  # an eigenvalue below this counts as 0
_DRAWN = 4  # rounds for each doubling of the ranks: as many as 4 cycles of the exponential graph


def mixture(name: str, ranks: int, pairs: Pairs) -> Schedule:
    """Make one round of gossip: each rank adds the values of its senders to its own.

    Each rank sends its buffer to its receivers, and adds its senders' buffers to its own as they
    arrive. (Shares are taken before: see ``share``.)

    Cost: 1 round; the busiest rank sends a buffer to each of its receivers; the time is d (alpha +
    beta N) + gamma N, where d is the largest number of senders or receivers of a rank, if additions
    are faster than messages and no two messages reach one rank at the same time.

    Args:
        name: name of the schedule.
        ranks: how many ranks take part.
        pairs: pairs of a sender and a receiver.

    Example:
        >>> schedule = mixture("to the next", 3, [(0, 1), (1, 2), (2, 0)])
        >>> schedule.verify().messages
        3
    """
    ranks = checked_ranks(ranks)
    pairs = _checked(name, ranks, pairs)
    receivers: list[list[int]] = [[] for _ in range(ranks)]
    senders: list[list[int]] = [[] for _ in range(ranks)]
    for sender, receiver in pairs:
        receivers[sender].append(receiver)
        senders[receiver].append(sender)

    def build(rank: int) -> Iterator[Move]:
        yield from (send(peer, 0) for peer in receivers[rank])
        yield from (add(peer, 0) for peer in senders[rank])
        yield finalise(0)

    most_sent, most_received = (max(map(len, each)) for each in (receivers, senders))

    def seconds(nbytes: float, link: Link, gamma: float) -> float:
        return fan_in(max(most_sent, most_received), link.seconds(nbytes), gamma * nbytes)

    cost = Cost(int(bool(pairs)), Fraction(most_sent), Fraction(most_received), flat(seconds))
    return trusted(Schedule(name, ranks, 1, build, cost, goal="mixture"))


def _checked(name: str, ranks: int, pairs: Pairs) -> list[tuple[int, int]]:
    checked: list[tuple[int, int]] = []
    expected = "a list of pairs (sender, receiver)"
    for pair in arguments.items(pairs, "pairs", expected, least=0):
        try:
            sender, receiver = map(operator.index, pair)
        except (TypeError, ValueError):
            sender = receiver = -1
        if sender == receiver or not (0 <= sender < ranks and 0 <= receiver < ranks):
            raise ScheduleError(
                f"{name}: expected pairs (sender, receiver) of two different ranks of "
                f"0..{ranks - 1}, got {pair!r:.100}"
            )
        checked.append((sender, receiver))
    again = [pair for pair, times in Counter(checked).items() if times > 1]
    if again:
        raise ScheduleError(
            f"{name}: expected each pair once in a round, but {again[0]} occurs twice"
        )
    return checked


# ---------------------------------------------------------------------------
# Topologies


def ring_graph(ranks: int) -> list[Pairs]:
    """Return one round, which repeats: each rank sends to both of its neighbours.

    The matrix has 1/3 for a rank and each neighbour, so differences shrink by :math:`1/3 + 2/3
    \\cos(2 \\pi / P)` in each round: slowly with many ranks.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> ring_graph(3)
        [[(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]]
    """
    # all in one direction first: no port gets two messages at once
    steps = {1 % ranks, -1 % ranks} - {0}
    return [[(rank, (rank + step) % ranks) for step in sorted(steps) for rank in range(ranks)]]


def exponential_graph(ranks: int) -> list[Pairs]:
    """Return rounds of one buffer per rank: in round t to the rank :math:`2^t` after it.

    If the ranks are a power of two, all hold the mean after log2 P rounds.

    Args:
        ranks: how many ranks take part.

    Example:
        >>> exponential_graph(4)
        [[(0, 1), (1, 2), (2, 3), (3, 0)], [(0, 2), (1, 3), (2, 0), (3, 1)]]

    Reference: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", 2019; Ying
    et al., "Exponential Graph is Provably Efficient for Decentralized Deep Training", 2021.
    """
    return [
        [(rank, (rank + (1 << turn)) % ranks) for rank in range(ranks)]
        for turn in range((ranks - 1).bit_length())
    ] or [[]]


def random_graph(ranks: int, seed: int = 0) -> list[Pairs]:
    """Return rounds that pair ranks at random. With an odd number of ranks, one sits out.

    There are 4 log2 P rounds, and more if these do not connect all ranks.

    Args:
        ranks: how many ranks take part.
        seed: seed of the pairs, which must be equal on all ranks.

    Example:
        >>> random_graph(2)
        [[(0, 1), (1, 0)]]

    Reference: Boyd et al., "Randomized Gossip Algorithms", 2006.
    """
    if ranks <= 2:
        return ring_graph(ranks)
    dice = random.Random(seed)
    rounds: list[Pairs] = []
    while len(rounds) < _DRAWN * (ranks - 1).bit_length() or _reached(ranks, rounds) < ranks:
        order = list(range(ranks))
        dice.shuffle(order)
        couples = list(zip(order[::2], order[1::2]))
        rounds.append(sorted(couples + [(b, a) for a, b in couples]))
    return rounds


TOPOLOGIES: dict[str, Callable[..., list[Pairs]]] = {
    "ring": ring_graph,
    "exponential": exponential_graph,
    "random": random_graph,
}


def mixtures(topology: str | Topology, ranks: int, seed: int = 0) -> list[Schedule]:
    """Return the rounds of a topology, which take turns.

    Args:
        topology: a name from ``TOPOLOGIES``; or a function from a number of ranks to a list of
            rounds, each a list of pairs (sender, receiver).
        ranks: how many ranks take part.
        seed: seed of ``"random"``.

    Raises:
        ScheduleError: a round is invalid, or a rank's value never reaches some other rank.

    Example:
        >>> [schedule.name for schedule in mixtures("exponential", 3)]
        ['gossip(exponential, 1 of 2)', 'gossip(exponential, 2 of 2)']
    """
    checked_topology(topology)
    ranks = checked_ranks(ranks)
    arguments.whole(seed, "seed")
    rounds = _rounds(topology, ranks, seed)
    said = topology if isinstance(topology, str) else f"own {zlib.crc32(repr(rounds).encode()):08x}"
    name = f"{said}, seed {seed}" if said == "random" else said
    made = [
        mixture(f"gossip({name}, {number} of {len(rounds)})", ranks, pairs)
        for number, pairs in enumerate(rounds, 1)
    ]
    _check_connected(name, ranks, rounds)
    return made


def checked_topology(topology: str | Topology) -> None:
    """Refuse a topology that is neither a name nor a function."""
    if not callable(topology):
        other = (
            "a function from a number of ranks to a list of rounds, each a list of pairs "
            "(sender, receiver)"
        )
        arguments.choice(topology, "topology", TOPOLOGIES, other)


def _rounds(topology: str | Topology, ranks: int, seed: int) -> list[Pairs]:
    if isinstance(topology, str):
        more = {"seed": seed} if topology == "random" else {}
        made: Sequence[Pairs] = TOPOLOGIES[topology](ranks, **more)
    else:
        made = topology(ranks)
    try:
        rounds: list[Pairs] = [list(pairs) for pairs in made]
    except TypeError:
        raise ScheduleError(
            f"{topology!r} made {made!r:.100} for {ranks} ranks; expected a list of rounds, each "
            "a list of pairs (sender, receiver)"
        ) from None
    if not rounds:
        raise ScheduleError(f"{topology!r} made no rounds for {ranks} ranks; expected one or more")
    return rounds


def _check_connected(name: str, ranks: int, rounds: Sequence[Pairs]) -> None:
    """Check that the rounds lead from each rank to each other rank."""
    for pairs, what in (
        (rounds, "reaches"),
        ([[(b, a) for a, b in one] for one in rounds], "hears of"),
    ):
        if (count := _reached(ranks, pairs)) < ranks:
            raise ScheduleError(
                f"gossip({name}) is not connected over time: rank 0 {what} {count} of {ranks} "
                "ranks, itself included, however many rounds follow. Expected rounds that "
                "together lead from each rank to each other"
            )


def _reached(ranks: int, rounds: Sequence[Pairs]) -> int:
    """Return the number of ranks that rank 0's value reaches, including rank 0."""
    after: list[list[int]] = [[] for _ in range(ranks)]
    for sender, receiver in itertools.chain(*rounds):
        after[sender].append(receiver)
    known, news = {0}, [0]
    while news:
        news = [rank for sender in news for rank in after[sender] if rank not in known]
        known.update(news)
    return len(known)


# ---------------------------------------------------------------------------
# # Properties of mixtures


def share(schedule: Schedule, rank: int) -> Fraction:
    """Return the share of its buffer that a rank keeps, and gives to each of its receivers.

    Args:
        schedule: a mixture.
        rank: a rank of the schedule.

    Example:
        >>> share(mixtures("ring", 5)[0], rank=2)
        Fraction(1, 3)
    """
    program = checked_schedule(schedule).program(rank)
    sent = sum(move.kind is Kind.SEND for move in program)
    return Fraction(1, 1 + sent)


def matrix(schedule: Schedule) -> list[list[Fraction]]:
    """Return the share of each rank's buffer in each result: a row for each receiver.

    Args:
        schedule: a mixture.

    Example:
        >>> print(*matrix(mixtures("exponential", 2)[0])[0])
        1/2 1/2
    """
    ranks = range(checked_schedule(schedule).ranks)
    shares = [share(schedule, rank) for rank in ranks]
    rows = []
    for rank in ranks:
        senders = _sources(schedule, rank)
        rows.append([part if s in senders else Fraction(0) for s, part in enumerate(shares)])
    return rows


def _sources(schedule: Schedule, rank: int) -> set[int]:
    return {rank} | {move.peer for move in schedule.program(rank) if move.kind is Kind.ADD}


def is_doubly_stochastic(schedule: Schedule) -> bool:
    """Return whether each rank gets a mean of its own and its senders' values.

    Args:
        schedule: a mixture.

    Example:
        >>> is_doubly_stochastic(mixture("one way", 2, [(0, 1)]))
        False
    """
    ranks = range(checked_schedule(schedule).ranks)
    shares = [share(schedule, rank) for rank in ranks]
    return all(sum(shares[s] for s in _sources(schedule, rank)) == 1 for rank in ranks)


def contraction(rounds: Sequence[Schedule]) -> float:
    r"""Return the average factor by which a round shrinks the differences between ranks.

    Let M be the product of the matrices of n rounds. Its largest eigenvalue is 1. The factor is
    :math:`|\lambda_2(M)|^{1/n}`, from the second largest eigenvalue; 1 minus it is called the
    spectral gap.

    Args:
        rounds: the mixtures that take turns.

    Example:
        >>> print(f"{contraction(mixtures('ring', 8)):.4f}")  # 1/3 + 2/3 cos(45 degrees)
        0.8047
    """
    import numpy as np

    rounds = arguments.items(rounds, "rounds", "a list of mixtures", checked_schedule)
    product = np.eye(rounds[0].ranks)
    for schedule in rounds:
        product = np.array(matrix(schedule), dtype=float) @ product
    second = sorted([0.0, *np.abs(np.linalg.eigvals(product))])[-2]
    return float(second ** (1 / len(rounds))) if second > _ROUNDING else 0.0
