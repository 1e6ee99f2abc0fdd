"""Search for the fastest cuts that fit into memory, with a bound on what was missed."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from tfscale.plan.cluster import Cluster
from tfscale.plan.cut import CHUNKS, ORDERS, Cut, Price
from tfscale.plan.formulas.grids import divisors
from tfscale.plan.formulas.state import ADAM, SHARDS, Numbers
from tfscale.plan.price import Pricer
from tfscale.plan.runs import runs
from tfscale.plan.units import Unit

_MOST_PER_STAGE = 16  # microbatches; more shorten a pipeline's bubble by less than 1/16
SECONDS = 30.0  # a search that takes longer stops with a gap


class MemoryLimitError(ValueError):
    """No cut fits into the devices' memory; the message says how much the smallest one needs."""


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search.

    Args:
        prices: the fastest cuts, best first.
        bound: seconds that no cut falls below, whether it fits into memory or not.
        priced: number of cuts that were priced.
    """

    prices: tuple[Price, ...]
    bound: float
    priced: int

    @property
    def gap(self) -> float:
        """Largest share by which a cut that was not found may be faster than the best one."""
        return max(0.0, 1 - self.bound / self.prices[0].seconds)


def cuts(
    ranks: int, batch: int, units: int, wires: Sequence[str], diloco: int | None = None
) -> Iterator[Cut]:
    """Yield all sizes of grids and pipelines on so many ranks, without what only saves memory."""
    for stages in divisors(ranks):
        if stages > units:
            continue
        for rows in divisors(ranks // stages):
            columns = ranks // stages // rows
            many = _microbatches(batch, columns, stages)
            for microbatches in many if stages > 1 else many[:1]:
                for order in _orders(stages, microbatches, units):
                    for wire in wires:
                        yield Cut(rows, columns, stages, microbatches, order, wire=wire)
                if diloco and columns > 1:
                    yield Cut(rows, columns, stages, microbatches, every=diloco)


def _orders(stages: int, microbatches: int, units: int) -> list[str]:
    """Return the orders that so many stages can work in."""
    if stages == 1 or microbatches == 1:
        return list(ORDERS[:1])
    return [
        order
        for order, chunks in CHUNKS.items()
        if chunks == 1 or (microbatches % stages == 0 and chunks * stages <= units)
    ]


def _microbatches(batch: int, columns: int, stages: int) -> list[int]:
    """Return numbers of microbatches that divide a column's samples, each about twice the last."""
    if columns > batch:
        return []
    found = [1]
    for number in divisors(batch // columns) if batch % columns == 0 else []:
        if 1.9 * found[-1] <= number <= _MOST_PER_STAGE * stages:
            found.append(number)
    return found


def search(
    units: Sequence[Unit],
    batch: int,
    cluster: Cluster,
    *,
    numbers: Numbers = ADAM,
    wires: Sequence[str] = ("fp32",),
    keep: int = 5,
    runnable: bool = False,
    staged: bool = True,
    diloco: int | None = None,
) -> Found:
    """Return the fastest cuts that fit into memory.

    Cuts are priced in the order of their bounds, until no bound is below the ``keep`` best prices.

    Args:
        units: the model.
        batch: samples of a step.
        cluster: the machines.
        numbers: bytes of a parameter.
        wires: formats in which gradients may be sent.
        keep: number of cuts to return.
        runnable: whether to leave out cuts that ``ScaleStrategy`` cannot run yet.
        staged: whether ``ScaleStrategy`` can cut the model into stages.
        diloco: number of steps of rounds to price, too; None for none.
    """
    pricer = Pricer(units, batch, cluster, numbers, runnable)
    every: Iterable[Cut] = cuts(cluster.devices, batch, len(units), wires, diloco)
    if runnable:
        every = (cut for cut in every if runs(cut, staged))
    waiting = sorted(((pricer.bound(cut), index, cut) for index, cut in enumerate(every)))
    best: list[Price] = []
    smallest: Price | None = None
    priced = 0
    deadline = time.monotonic() + SECONDS
    for bound, _, cut in waiting:
        if (len(best) >= keep and bound >= best[-1].seconds) or time.monotonic() > deadline:
            break
        for price in _variants(pricer, cut, cluster, runnable):
            priced += 1
            smallest = price if smallest is None or price.bytes < smallest.bytes else smallest
            if price.bytes <= cluster.memory:
                best = sorted([*best, price], key=lambda one: (one.seconds, one.bytes))[:keep]
    if not best:
        raise _too_large(smallest, cluster, batch)
    return Found(tuple(best), waiting[0][0], priced)


def _variants(pricer: Pricer, cut: Cut, cluster: Cluster, runnable: bool) -> Iterator[Price]:
    """Yield prices of a cut, without recomputation and with it, until one of each fits.

    What costs no time is tried first: shards, and microbatches without a pipeline.
    """
    shards = SHARDS[: 1 if cut.columns == 1 or cut.every > 1 else 4]
    many = [cut.microbatches]
    if cut.stages == 1:
        many = _microbatches(pricer.batch, cut.columns, cut.stages)
    flags = [
        (False, True),
        (False, True)[: min(cut.rows, 2)],
        (False, True)[: 1 + (cluster.worst.bus > 0)],
    ]
    for recompute, lean, offload in itertools.product(*flags):
        for shard in shards:
            fits = False
            for microbatches in many:
                variant = dataclasses.replace(
                    cut, shard=shard, microbatches=microbatches, recompute=recompute, lean=lean,
                    offload=offload,
                )  # fmt: skip
                may = not runnable or runs(variant, staged=True)
                price = pricer.price(variant) if may else None
                if price is not None:
                    yield price
                    if fits := price.bytes <= cluster.memory:
                        break
            if fits and not cluster.worst.update:  # or a shorter update may pay for shards
                break


def _too_large(smallest: Price | None, cluster: Cluster, batch: int) -> MemoryLimitError:
    if smallest is None:
        return MemoryLimitError(
            f"a batch of {batch} samples cannot be cut for {cluster.devices} devices; "
            "take a larger batch, or fewer devices"
        )
    need, have = smallest.bytes / 1e9, cluster.memory / 1e9
    largest = max(smallest.memory, key=lambda name: smallest.memory[name])
    return MemoryLimitError(
        f"this model does not fit: the smallest cut ({smallest.cut}) needs {need:.2f} GB on each "
        f"of {cluster.devices} devices, which have {have:.2f} GB; most of it is {largest}. Take "
        f"devices with {need:.2f} GB or more, or more devices"
        + (", or a smaller batch" if largest == "activations" else "")
    )
