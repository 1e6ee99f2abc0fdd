"""The meaning of Slurm's variables: hosts, tasks and ports, and the place of each task."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

_RANGES = r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*"
_HOST = rf"(?:[^,\[\]\s]|\[{_RANGES}\])+"
_TASKS = r"([0-9]+)(?:\(x([0-9]+)\))?"

FIRST_PORT, PORTS = 12000, 20000  # below the ephemeral ports
_JOB_STRIDE, _STEP_STRIDE = (
    64,
    8,
)  # ports between two consecutive jobs, and two consecutive steps of a job


def hosts(text: str) -> list[str]:
    """Expand a list of hosts such as ``"a[1-3,07-10]b,c"``."""
    if not re.fullmatch(rf"{_HOST}(?:,{_HOST})*", text):
        raise ValueError('is not a list of hosts like "a[1-3,07-10],b"')
    return [host for some in re.findall(_HOST, text) for host in _expanded(some)]


def _expanded(some: str) -> Iterator[str]:
    """Expand ``"a[1-2]b[3,4]"``: the last bracket varies fastest."""
    parts = re.split(r"\[(.*?)\]", some)  # every second part stood in brackets
    choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for one in ranges.split(","):
        first, _, last = one.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"has a range that runs backwards, [{one}]")
        yield from (str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1))


def tasks(text: str) -> list[int]:
    """Expand ``"2(x3),1"``: the number of tasks of each host."""
    if not re.fullmatch(rf"{_TASKS}(?:,{_TASKS})*", text):
        raise ValueError('is not a list of numbers like "2(x3),1"')
    return [int(count) for count, times in re.findall(_TASKS, text) for _ in range(int(times or 1))]


def ports(text: str) -> list[int]:
    """Expand ``"12000-12003,12010"``: the ports of a step on each host."""
    if not re.fullmatch(_RANGES, text):
        raise ValueError('is not a list of ports like "12000-12003"')
    return [int(port) for port in _numbers(text)]


def unreserved_port(job: int, step: int, local_index: int) -> int:
    """Return a port without reservations: concurrent steps on one host seldom share one."""
    return FIRST_PORT + (_JOB_STRIDE * job + _STEP_STRIDE * step) % PORTS + local_index


def places(each: Sequence[int], distribution: str) -> list[tuple[int, int]]:
    """Return for each task the index of its host, and its index on that host.

    Args:
        each: number of tasks of each host.
        distribution: as srun's --distribution; Slurm's default is block.
    """
    kind = re.split("[:,]", distribution)[0]
    by_host = [(host, local) for host, count in enumerate(each) for local in range(count)]
    if kind in ("", "block", "unknown", "*"):
        return by_host
    if kind == "cyclic":
        return sorted(by_host, key=lambda place: place[::-1])
    raise ValueError("is not block or cyclic: use srun --distribution=block, or set TF_CONFIG")
