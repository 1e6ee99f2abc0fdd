"""Hosts and their numbers of workers: ``--hosts a:2,b:2``, ``--hostfile``, ``-n``, ``-np``."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_HERE = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"(?:[\w.-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\])")  # user@name, or [IPv6]


class Host(NamedTuple):
    """A host and its number of workers."""

    name: str
    workers: int

    @property
    def is_here(self) -> bool:
        """Whether workers on this host start without ssh."""
        return self.name in (*_HERE, socket.gethostname())


class Place(NamedTuple):
    """The place of a worker."""

    rank: int
    host: int
    local: int  # index among its host's workers


def listed(text: str, each: int) -> list[Host]:
    """Parse a list of hosts: ``a:2,b`` has two workers on a, and ``each`` on b."""
    found = [_host(word, each) for word in text.split(",") if word.strip()]
    if not found:
        raise ValueError(f"{text!r} names no host; expected hosts such as 'a:2,b:2'")
    return _merged(found)


def in_file(path: Path, each: int) -> list[Host]:
    """Read a file with a host per line: ``a``, ``a:2``, ``a slots=2``; # begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of hosts cannot be read: {error}") from None
    found = []
    for line in lines:
        words = line.partition("#")[0].split()
        if words:
            slots = re.fullmatch(r"slots=(\d+)", words[1]) if len(words) == 2 else None
            if len(words) > 1 and not slots:
                raise ValueError(f"{path} has the line {line!r}; expected 'host slots=2'")
            found.append(_host(f"{words[0]}:{slots[1]}" if slots else words[0], each))
    if not found:
        raise ValueError(f"{path} names no host; expected lines like 'host slots=2'")
    return _merged(found)


def _merged(hosts: Sequence[Host]) -> list[Host]:
    """Merge hosts that are named several times: the workers of a name share one host."""
    workers: dict[str, int] = {}
    for host in hosts:
        workers[host.name] = workers.get(host.name, 0) + host.workers
    return [Host(*each) for each in workers.items()]


def _host(word: str, each: int) -> Host:
    name, colon, number = word.strip().rpartition(":")
    if not colon or word.strip().endswith("]"):
        name, number = word.strip(), str(each)
    if not _NAME.fullmatch(name) or name.startswith("-") or not number.isdecimal() or number == "0":
        raise ValueError(f"{word!r} is not a host with a number of workers, such as 'host:2'")
    return Host(name, int(number))


def first(hosts: Sequence[Host], total: int | None) -> list[Host]:
    """Return hosts for a total number of workers; the first hosts are filled first."""
    if total is None:
        return list(hosts)
    room = sum(host.workers for host in hosts)
    if total > room:
        raise ValueError(
            f"{total} workers were asked for, and the hosts have room for {room}: "
            f"{', '.join(f'{host.name}:{host.workers}' for host in hosts)}"
        )
    chosen, left = [], total
    for host in hosts:
        if left:
            chosen.append(host._replace(workers=min(host.workers, left)))
            left -= chosen[-1].workers
    return chosen


def places(hosts: Sequence[Host], first_rank: int = 0) -> list[Place]:
    """Return the places of all workers, in the order of their ranks."""
    pairs = [(at, local) for at, host in enumerate(hosts) for local in range(host.workers)]
    return [Place(rank, at, local) for rank, (at, local) in enumerate(pairs, first_rank)]
