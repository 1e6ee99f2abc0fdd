"""The memory and cost of a step's units, as numbers for the solver."""

from __future__ import annotations

import numpy as np

from tfscale.training.recompute.simulate import memory
from tfscale.training.recompute.solve import Chain, Numbers
from tfscale.training.recompute.traced_step import TracedStep


def measure(step: TracedStep, pile_up: bool = False) -> Chain:
    """Return the units of a step as a chain.

    Args:
        step: the step.
        pile_up: whether all gradients stay until the last one exists.
    """
    saved, last_use = _saved(step)
    forward, backward = _working(step, saved, last_use, memory(step, pile_up=pile_up))
    borders = _Borders(step, set(last_use))
    cost, last_cost = _costs(step, set(last_use))
    return Chain(
        saved=saved,
        forward=forward,
        backward=backward,
        cost=cost,
        last_cost=last_cost,
        gradient=borders.gradient(),
        leaving=borders.leaving(),
        entering=borders.entering(),
    )


def _saved(step: TracedStep) -> tuple[Numbers, dict[int, int]]:
    """Return the bytes that each unit keeps for the backward pass, and each home's last use."""
    last_use: dict[int, int] = {}
    for tensor, known in enumerate(step.tensors):
        later = [index for index in step.consumers[tensor][-1:] if index >= step.end]
        if later and step.producer[known.home] in step.unit_of:
            last_use[known.home] = max(later[0], last_use.get(known.home, 0))
    saved = np.zeros(len(step.units))
    for home in last_use:
        saved[step.unit_of[step.producer[home]]] += step.tensors[home].size
    return saved, last_use


def _working(
    step: TracedStep, saved: Numbers, last_use: dict[int, int], live: list[int]
) -> tuple[Numbers, Numbers]:
    """Return the bytes beside the saved ones, while each unit runs forward and backward."""
    total = np.cumsum(saved)
    forward, backward = np.zeros(len(saved)), np.zeros(len(saved))
    for index, unit in step.unit_of.items():
        forward[unit] = max(forward[unit], live[index] - (total[unit] - saved[unit]))
    newest = np.zeros(len(step.ops), int)  # the last unit that something is still needed of
    for home, last in last_use.items():
        newest[last] = max(newest[last], step.unit_of[step.producer[home]])
    newest = np.maximum.accumulate(newest[::-1])[::-1]
    for index in range(step.end, len(step.ops)):
        unit = newest[index]
        backward[unit] = max(backward[unit], live[index] - total[unit])
    return forward, backward


def _costs(step: TracedStep, saved: set[int]) -> tuple[Numbers, Numbers]:
    """Return the cost of each unit within a segment, and as the last unit of a segment."""
    count = len(step.units)
    cost, last = np.zeros(count), np.zeros(count)
    for number in range(count):
        again = step.again(step.ops_of(range(number, number + 1)))
        last[number] = sum(step.ops[index].cost for index in again.ops) if again else 0.0
        unit = step.units[number]
        cost[number] = sum(
            step.ops[index].cost
            for index in range(unit.start, unit.stop)
            if any(not step.tensors[tensor].lasting for tensor in step.ops[index].outputs)
        )
    return cost, last


class _Borders:
    """The tensors that cross the borders between units."""

    def __init__(self, step: TracedStep, saved: set[int]) -> None:
        self._count = len(step.units)
        self._crossing = []  # producer, users, bytes, whether it is saved anyway
        self._always = np.zeros(self._count)  # saved, and never computed again
        users: dict[int, set[int]] = {}
        for tensor, known in enumerate(step.tensors):
            units = {step.unit_of[i] for i in step.consumers[tensor] if i in step.unit_of}
            users.setdefault(known.home, set()).update(units)
        for home, units in users.items():
            known = step.tensors[home]
            maker = step.unit_of.get(step.producer[home])
            if maker is None or not known.size:
                continue
            behind = {unit for unit in units if unit > maker}
            if behind and not (known.lasting and home in saved):
                self._crossing.append((maker, behind, known.size, home in saved))
            elif home in saved and known.lasting:
                self._always[maker] += known.size

    def gradient(self) -> Numbers:
        """Return the bytes that cross each border, which equal those of their gradients."""
        result = np.zeros(self._count + 1)
        for maker, users, size, _ in self._crossing:
            result[maker + 1 : max(users) + 1] += size
        return result

    def leaving(self) -> Numbers:
        """Return the bytes of saved tensors that later units also need, and of lasting ones."""
        total = np.cumsum(np.r_[0.0, self._always])
        result: Numbers = total[None, :] - total[:, None]
        for maker, users, size, saved in self._crossing:
            if saved:
                result[: maker + 1, maker + 1 : max(users) + 1] += size
        return result

    def entering(self) -> Numbers:
        """Return the bytes of unsaved tensors that computing a segment again needs."""
        result = np.zeros((self._count + 1, self._count + 1))
        for maker, users, size, saved in self._crossing:
            if not saved:
                for start in range(maker + 1, max(users) + 1):
                    first = min(user for user in users if user >= start)
                    result[start, first + 1 :] += size
        return result
