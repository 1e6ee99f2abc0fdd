"""Contestants of ``tfscale bench fit``: which strategy trains which model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PARTS = ("one", "devices", "workers", "overlap", "methods", "rules", "sharding")
USUAL_PARTS = PARTS[:4]
METHODS = ("fp32", "int8", "int4", "sign", "PowerSGD(4)", "TopK(0.01)")
RULES = ("EveryStep()", "LocalSGD(100)", "DiLoCo(100, wire='int8')")
WIRES = ("fp32", "bf16", "int8")
REPLICAS = 2  # processes of the parts that use several


@dataclasses.dataclass(frozen=True)
class FitContestant:
    """Training of one model in one way, in processes of its own.

    Args:
        part: part of the benchmark; all contestants of a part take turns.
        name: name in tables.
        way: strategy and loop of the training, a key of ``_WAYS`` in ``fit_worker``.
        model: name of the model in ``fit_worker``.
        processes: number of processes; each has a replica on every device.
        devices: number of logical devices of each process.
        wire: name of a wire, or a method as a Python expression.
        rule: sync rule as a Python expression.
        algorithm: name of a schedule, or ``"auto"``.
        arguments: arguments of ``ScaleStrategy`` as JSON, of the ways ``"planned..."``.
        pinned: whether each process keeps to a core of its own, as far as there are cores.
        held: for each process, the cgroup that gives it a part of a core; empty without them.
    """

    part: str
    name: str
    way: str
    model: str
    processes: int = 1
    devices: int = 1
    wire: str = "fp32"
    rule: str = RULES[0]
    algorithm: str = "auto"
    arguments: str = "{}"
    pinned: bool = False
    held: Sequence[str] = ()

    @property
    def replicas(self) -> int:
        """Number of replicas in all processes."""
        return self.processes * self.devices


def contestants(
    part: str,
    wires: Sequence[str] = WIRES,
    tiny: bool = False,
    against: Sequence[str] = (),
    methods: Sequence[str] = METHODS,
    rules: Sequence[str] = RULES,
    processes: int = REPLICAS,
) -> list[FitContestant]:
    """Return all contestants of a part, in groups with the same number of devices.

    The others of a group are compared with its first contestant.

    Args:
        part: one of ``PARTS``.
        wires: wires of the part ``"workers"``.
        tiny: whether to use toy models.
        against: other libraries in the part ``"workers"``: ``"horovod"``.
        methods: methods of the part ``"methods"``.
        rules: sync rules of the part ``"rules"``.
        processes: number of processes of the parts ``"methods"``, ``"rules"`` and ``"sharding"``.
    """
    small, wide, deep = ("tiny",) * 3 if tiny else ("conv", "dense", "deep")
    if part == "one":
        rows = [("no strategy", "none"), ("ScaleStrategy", "scale"), ("auto_strategy()", "auto")]
        return [FitContestant(part, name, way, small) for name, way in rows]
    if part == "devices":
        rows = [("MirroredStrategy", "mirrored"), ("ScaleStrategy", "scale")]
        return [FitContestant(part, name, way, small, 1, n) for n in (2, 4) for name, way in rows]
    if part == "workers":
        stock = FitContestant(part, "MultiWorkerMirrored, own loop", "stock", wide, REPLICAS)
        ours = [
            FitContestant(part, f"ScaleStrategy {wire}", "scale", wide, REPLICAS, wire=wire)
            for wire in wires
        ]
        ours.append(
            FitContestant(part, "ScaleStrategy, TensorFlow's sums", "tensorflow", wide, REPLICAS)
        )
        others = [FitContestant(part, "Horovod", way, wide, REPLICAS) for way in against]
        return [stock, *others, *ours]
    if part == "methods":
        without = FitContestant(part, "without exchange", "apart", wide, processes)
        ours = [FitContestant(part, m, "scale", wide, processes, wire=m) for m in methods]
        return [without, *ours]
    if part == "sharding":
        stack = "tiny" if tiny else "stack"
        copies = FitContestant(part, "copies of Adam's state", "copies", stack, processes)
        parts = FitContestant(part, "parts of Adam's state", "sharded", stack, processes)
        rounded = dataclasses.replace(parts, name="parts, weights as bf16", wire="bf16")
        return [copies, parts, rounded]
    if part == "rules":
        return [FitContestant(part, rule, part, wide, processes, rule=rule) for rule in rules]
    rows = [("without exchange", "apart"), ("ScaleStrategy", "scale"), ("exchange alone", "sums")]
    return [FitContestant(part, name, way, deep, REPLICAS) for name, way in rows]
