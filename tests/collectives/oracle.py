"""A second, naive opinion: run a schedule on lists of contributions, in random order.

It shares no code with the verifier. A chunk's value is the list of the ranks whose
contributions are in it, so that a doubled or a lost contribution shows.
"""

from __future__ import annotations

import random

from tfscale.collectives import Kind, Schedule


def works(schedule: Schedule, seed: int = 0) -> bool:
    """Does every rank end with everyone's contribution, whatever the order of events?"""
    dice = random.Random(seed)
    ranks, chunks = range(schedule.ranks), range(schedule.chunks)
    programs = [list(schedule.build(rank)) for rank in ranks]
    values = {(rank, chunk): [rank] for rank in ranks for chunk in chunks}
    final = dict.fromkeys(values, False)
    owners: dict[int, int] = {}
    mail: dict[tuple, list] = {}

    def enabled(rank: int) -> list[int]:
        touched: set[int] = set()
        found = []
        for index, move in enumerate(programs[rank]):
            span = set(range(move.first, move.last))
            if not span & touched:
                phase = move.kind is Kind.KEEP
                sends = move.kind in (Kind.SEND, Kind.FINALISE)
                if sends or mail.get((move.peer, rank, move.first, move.last, phase)):
                    found.append(index)
            touched |= span
        return found

    while choices := [(rank, index) for rank in ranks for index in enabled(rank)]:
        rank, index = dice.choice(choices)
        kind, peer, first, last = programs[rank].pop(index)
        span = [(rank, chunk) for chunk in range(first, last)]
        if kind is Kind.SEND:
            if len({final[place] for place in span}) > 1 or not 0 <= peer < schedule.ranks:
                return False
            letter = [list(values[place]) for place in span]
            mail.setdefault((rank, peer, first, last, final[span[0]]), []).append(letter)
        elif kind is Kind.FINALISE:
            for place in span:
                if place[1] in owners:
                    return False
                owners[place[1]] = rank
                final[place] = True
        else:
            letter = mail[peer, rank, first, last, kind is Kind.KEEP].pop(0)
            for place, content in zip(span, letter, strict=True):
                if final[place]:
                    return False
                values[place] = content if kind is Kind.KEEP else values[place] + content
                final[place] = kind is Kind.KEEP
    everyone = list(ranks)
    return (
        not any(programs)
        and not any(mail.values())
        and all(final.values())
        and all(sorted(value) == everyone for value in values.values())
    )
