"""Profiles of PipeDream's profiler: a graph of layers with times and sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

_NODE = re.compile(
    r"(?P<id>\w+) -- (?P<layer>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+), activation_size=(?P<activation>[^,]+), "
    r"parameter_size=(?P<parameters>[\d.]+)"
)
_EDGE = re.compile(r"(?P<source>\w+) -- (?P<target>\w+)")


@dataclasses.dataclass(frozen=True)
class Chain:
    """A model as a chain of layers that a pipeline can cut anywhere.

    Args:
        seconds: for each layer the time of its forward and backward pass.
        parameters: for each layer the bytes of its weights.
        cuts: for each layer but the last the bytes that cross the cut after it.
        names: for each layer its name.
    """

    seconds: tuple[float, ...]
    parameters: tuple[float, ...]
    cuts: tuple[float, ...]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)


@dataclasses.dataclass(frozen=True)
class _Node:
    layer: str
    seconds: float
    activation: float
    parameters: float


def read_profile(path: Path) -> Chain:
    """Read a profile as a chain: layers in the order of their edges.

    Inputs cost nothing. A branch that crosses a cut counts once, however many layers read it.
    """
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if node := _NODE.fullmatch(line.strip()):
            nodes[node["id"]] = _node(node)
        elif edge := _EDGE.fullmatch(line.strip()):
            edges.append((edge["source"], edge["target"]))
        elif line.strip():
            raise ValueError(
                f"{path}, line {number}: expected 'id -- layer -- forward_compute_time=..., ...' "
                f"or 'id -- id', got {line.strip()!r:.60}"
            )
    order = _in_order(nodes, edges)
    place = {one: index for index, one in enumerate(order)}
    last_use = dict.fromkeys(order, 0)
    for source, target in edges:
        last_use[source] = max(last_use[source], place[target])
    cuts = [0.0] * (len(order) - 1)
    for index, one in enumerate(order):
        for cut in range(index, last_use[one]):
            cuts[cut] += nodes[one].activation
    return Chain(
        tuple(nodes[one].seconds for one in order),
        tuple(nodes[one].parameters for one in order),
        tuple(cuts),
        tuple(nodes[one].layer for one in order),
    )


def _node(found: re.Match[str]) -> _Node:
    if found["layer"].startswith("Input"):
        return _Node(found["layer"], 0, 0, 0)
    sizes = re.findall(r"[\d.]+", found["activation"])  # several outputs stand in brackets
    seconds = (float(found["forward"]) + float(found["backward"])) / 1000
    return _Node(found["layer"], seconds, sum(map(float, sizes)), float(found["parameters"]))


def _in_order(nodes: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the nodes so that each comes after those that it reads, depth first."""
    sources: dict[str, list[str]] = {one: [] for one in nodes}
    for source, target in edges:
        sources[target].append(source)
    order: dict[str, None] = {}
    for start in sorted(sources, key=lambda one: int(re.sub(r"\D", "", one) or 0)):
        waiting = [start]
        while waiting:
            missing = [one for one in sources[waiting[-1]] if one not in order]
            if missing:
                waiting += missing
            else:
                order[waiting.pop()] = None
    return list(order)
