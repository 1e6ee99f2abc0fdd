"""Arguments of ``ScaleStrategy`` that run a cut, and what they cannot run of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfscale.collectives import ALGORITHMS
from tfscale.plan.cluster import Cluster
from tfscale.plan.cut import Cut, Price
from tfscale.plan.units import Unit

_ORDERS = {"1f1b": "1f1b", "interleaved": "interleaved", "zero bubble": "zero_bubble"}
_OF_SHARDS = {"state": "optimizer", "gradients": "optimizer", "all": "all"}
_UNEVEN = 1.2  # rates that differ by less than this factor get equal shares
# The kind of a rule for a unit's parts, if a row shares the unit in some spread.
_RULES = {
    "columns": {"either": "columns"},
    "rows": {"either": "rows"},
    "heads": {"heads": "heads", "columns": "columns", "rows": "rows"},
    "vocabulary": {"vocabulary": "vocabulary"},
}


def runs(cut: Cut, staged: bool) -> bool:
    """Return whether an argument of ``ScaleStrategy`` says each size of a cut.

    Args:
        cut: the cut.
        staged: whether the model can be cut into stages: it is Sequential or functional.
    """
    if cut.offload or cut.lean or (cut.stages > 1 and not (staged and cut.order in _ORDERS)):
        return False
    return (cut.rows == cut.stages == 1) or (cut.shard != "all" and cut.every == 1)


def strategy_arguments(price: Price, units: Sequence[Unit], cluster: Cluster) -> dict[str, Any]:
    """Return the arguments of ``ScaleStrategy`` that run a cut, as far as it can be run."""
    cut, name = price.cut, price.algorithm
    found: dict[str, Any] = {
        "algorithm": name if name in ALGORITHMS else "auto",
        "wire": cut.wire,
    }
    if cut.shard in _OF_SHARDS and runs(cut, staged=True):
        found["shard"] = _OF_SHARDS[cut.shard]
    if found.get("shard") == "all":
        del found["wire"]
    rules, grid = tensor_rules(price, units), {}
    if rules:
        grid["tensor"], found["tensor"] = cut.rows, rules
    if cut.stages > 1 and cut.order in _ORDERS:
        grid["stages"] = cut.stages
        found["pipeline"] = {
            "cuts": [units[end].name for end in price.ends[:-1]],
            "microbatches": cut.microbatches,
            "order": _ORDERS[cut.order],
        }
    if grid:
        found["grid"] = grid
    if _is_uneven(cut, cluster):
        least = min(cluster.rates)
        found["shares"] = [round(rate / least, 3) for rate in cluster.rates]
    return found


def tensor_rules(price: Price, units: Sequence[Unit]) -> dict[str, str]:
    """Return the rules ``tensor={...}`` of the units that a row shares; empty for one rank."""
    if price.cut.rows == 1:
        return {}
    found: dict[str, str] = {}
    for unit, spread in zip(units, price.spreads, strict=True):
        kinds = _RULES.get("heads" if spread == "sequence" else spread, {})
        found |= {pattern: kinds[cut] for pattern, cut in unit.cuts if cut in kinds}
    return found


def missing(price: Price, units: Sequence[Unit], staged: bool) -> list[str]:
    """Return what no argument does that ``strategy_arguments`` returns; empty if all is done."""
    cut, rules = price.cut, tensor_rules(price, units)
    found = []
    if cut.rows > 1:
        used = {s for s in price.spreads if s not in ("copies", "channels")}
        if not rules or used - _RULES.keys():
            found.append(f"rows of {cut.rows} ranks that share layers ({', '.join(sorted(used))})")
    if cut.stages > 1 and not staged:
        found.append(
            f"a pipeline of {cut.stages} stages: the model is neither Sequential nor functional"
        )
    if cut.shard == "all" and not cut.rows == cut.stages == 1:
        found.append(f"ZeRO-3 beside rows of {cut.rows} ranks and {cut.stages} stages")
    if cut.recompute:
        found.append("recomputation as an argument: use tfscale.callbacks.Recompute")
    if cut.stages == 1 and cut.microbatches > 1:
        found.append(
            f"{cut.microbatches} microbatches as an argument: use the optimizer's "
            "gradient_accumulation_steps"
        )
    if cut.every > 1:
        found.append(f"rounds of {cut.every} steps as data: use tfscale.sync.DiLoCo({cut.every})")
    if cut.offload:
        found.append("optimizer state in the memory of the hosts")
    return found


def _is_uneven(cut: Cut, cluster: Cluster) -> bool:
    """Return whether data parallelism gains by unequal shares: measured rates differ always."""
    uneven = max(cluster.rates) > _UNEVEN * min(cluster.rates)
    return uneven and cut.rows == cut.stages == 1 and cut.every == 1
