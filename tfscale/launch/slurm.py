"""What Slurm's variables mean: lists of hosts, tasks and ports, and which task is where."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_RANGES = r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*"
_HOST = rf"(?:[^,\[\]\s]|\[{_RANGES}\])+"
_TASKS = r"([0-9]+)(?:\(x([0-9]+)\))?"

FIRST_PORT, PORTS = 12000, 20000  # below those that systems give to whoever asks for any
_OF_JOB, _OF_STEP = 64, 8  # ports between two jobs that follow each other, and two steps of one


def hosts(text: str) -> list[str]:
    """``"a[1-3,07-10]b,c"``, written out."""
    if not re.fullmatch(rf"{_HOST}(?:,{_HOST})*", text):
        raise ValueError('is no list of hosts like "a[1-3,07-10],b"')
    return [host for some in re.findall(_HOST, text) for host in _each(some)]


def _each(some: str) -> Iterator[str]:
    """Of ``"a[1-2]b[3,4]"``: the last bracket runs first."""
    parts = re.split(r"\[(.*?)\]", some)  # every second one stood in brackets
    choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"has a range that runs backwards, [{one}]")
        yield from (str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1))


def tasks(text: str) -> list[int]:
    """``"2(x3),1"``, written out: how many tasks each host has."""
    if not re.fullmatch(rf"{_TASKS}(?:,{_TASKS})*", text):
        raise ValueError('is no list of numbers like "2(x3),1"')
    return [int(count) for count, times in re.findall(_TASKS, text) for _ in range(int(times or 1))]


def ports(text: str) -> list[int]:
    """``"12000-12003,12010"``, written out: the ports that a step has on each host."""
    if not re.fullmatch(_RANGES, text):
        raise ValueError('is no list of ports like "12000-12003"')
    return [int(port) for port in _numbers(text)]


def own_port(job: int, step: int, local_index: int) -> int:
    """Where nothing is reserved: steps that run at once on one host seldom share a port."""
    return FIRST_PORT + (_OF_JOB * job + _OF_STEP * step) % PORTS + local_index


def places(each: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """For each task the number of its host, and its own number there.

    Args:
        each: how many tasks each host has.
        distribution: as srun's --distribution; Slurm's default is block.
    """
    kind = re.split("[:,]", distribution)[0]
    by_host = [(host, local) for host, count in enumerate(each) for local in range(count)]
    if kind in ("", "block", "unknown", "*"):
        return by_host
    if kind == "cyclic":
        return sorted(by_host, key=lambda place: place[::-1])
    raise ValueError("is not block or cyclic: use srun --distribution=block, or set TF_CONFIG")
