"""Arguments of a ``ScaleStrategy``: their checks, and what follows from them on any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfscale.bridge.installed import KERAS_2
from tfscale.collectives.registry import checked_algorithm
from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.method import Wire, refuse_several_exchanges
from tfscale.compression.policy import MethodPolicy, policy_of, wire_policy_of
from tfscale.exchange import backends
from tfscale.exchange.collective_schedules import Algorithm
from tfscale.native.group import checked_patience, checked_resolver
from tfscale.native.transport import checked as checked_transport
from tfscale.parallel import rules
from tfscale.parallel.grid import Grid
from tfscale.parallel.pipeline import Pipeline
from tfscale.strategy.batch import shares
from tfscale.strategy.losses.own_losses import CHOICES
from tfscale.support import arguments, records
from tfscale.support.sizes import number_of_bytes
from tfscale.sync import EveryStep, Rule
from tfscale.sync.rule import refuse_wrong_lengths

DEADLINE = 120.0
OPTIMIZER, ALL = "optimizer", "all"  # values of the argument ``shard``
WIRES_OF_WEIGHTS = (LOSSLESS, "bf16")
_A_PIPELINE = "a pipeline, such as tfscale.Pipeline(cuts=['block2'], microbatches=8), or None"
_A_GRID = "a grid, such as tfscale.Grid(tensor=2), or None"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked arguments of a ``ScaleStrategy``; see there.

    Attributes:
        policy: the policy that says which method sums which gradient.
        weights_policy: the policy that says on which wire updated weights are sent.
        sync: the rule by which replicas agree, ``EveryStep`` by default.
        backend: the backend; ``"auto"`` if the devices decide.
        bucket_bytes: the number of bytes; None if the measured links decide.
    """

    algorithm: Algorithm
    wire: Any
    devices: Sequence[str] | None
    cluster_resolver: Any
    sync: Rule
    method: Any
    error_feedback: bool | None
    bucket_bytes: int | None
    batch_norm: str
    own_losses: str | None
    shard: str | None
    weights_wire: Any
    grid: Grid | None
    tensor: Mapping[str, str] | None
    pipeline: Pipeline | None
    shares: Any
    schedule_file: str | Path | None
    deadline: float
    slow_after: float
    join_timeout: float
    transport: str
    backend: str
    policy: MethodPolicy
    weights_policy: MethodPolicy

    @property
    def in_rounds(self) -> bool:
        """Whether replicas agree only at the ends of rounds."""
        return not isinstance(self.sync, EveryStep)

    def of_all_workers(self) -> dict[str, Any]:
        """Return, by name, what must be equal on all workers."""
        file = self.schedule_file
        return {
            "algorithm": self.algorithm,
            "wire": repr(self.policy) if self.method is None else None,
            "method": self.method and repr(self.policy),
            "error_feedback": self.error_feedback,
            "bucket_bytes": self.bucket_bytes,
            "backend": self.backend,
            "sync": self.sync.describe(),
            "batch_norm": self.batch_norm,
            "own_losses": self.own_losses,
            "shard": self.shard,
            "weights_wire": repr(self.weights_policy),
            "grid": self.grid and repr(self.grid),
            "tensor": self.tensor and dict(self.tensor),
            "pipeline": self.pipeline and self.pipeline.described(),
            "shares": self.shares,
            "schedule_file": file and _choices_of(Path(file)),
        }


def checked(**given: Any) -> Settings:
    """Return the settings that arguments of ``ScaleStrategy`` make, or raise."""
    given = {name: _made(name, value) for name, value in given.items()}
    check(**given)
    of_gradients = {name: given[name] for name in ("wire", "method", "error_feedback")}
    policy = policy_of(**of_gradients)
    rule = _rule(given["sync"], **of_gradients)
    of_engine = {name: given[name] for name in ("algorithm", "schedule_file", "transport")}
    of_engine["sync"] = None if isinstance(rule, EveryStep) else rule
    of_engine["grid"] = given["grid"]
    of_weights = _weights_policy(given["weights_wire"], given["shard"], given["grid"])
    of_engine["weights_wire"] = None if of_weights == MethodPolicy() else given["weights_wire"]
    # The engine's log says how long a step has waited.
    of_engine["shares"] = given["shares"] if given["shares"] == shares.MEASURED else None
    if rule.bound:
        refuse_several_exchanges(policy.methods)
    if given["shard"] is not None:
        _refuse_unsharded(given["shard"], policy, rule)
    _refuse_grid(given["grid"], given["tensor"], given["shard"], rule)
    _refuse_pipeline(given["grid"], given["pipeline"])
    _refuse_shares(given["shares"], given["grid"], given["shard"], rule)
    feedback, size = given["error_feedback"], given["bucket_bytes"]
    given |= {
        "sync": rule,
        "backend": backends.checked(given["backend"], policy, feedback, **of_engine),
        "bucket_bytes": None if size is None else number_of_bytes(size, "bucket_bytes"),
    }
    return Settings(**given, policy=policy, weights_policy=of_weights)


def _made(name: str, value: Any) -> Any:
    """Return a grid or a pipeline that is given by its fields; any other value as it is."""
    kind = {"grid": Grid, "pipeline": Pipeline}.get(name)
    if kind is None or not isinstance(value, Mapping) or not value:
        return value
    known = [field.name for field in dataclasses.fields(kind)]
    for key in value:
        arguments.choice(key, f"a key of {name}", known)
    return kind(**value)


def check(**given: Any) -> None:
    """Raise if an argument of ``ScaleStrategy`` is wrong by itself, on any machine."""
    for name, value in given.items():
        if name in _ALWAYS or (value is not None and name in _UNLESS_NONE):
            (_ALWAYS.get(name) or _UNLESS_NONE[name])(value, name)


def _checked_rule(sync: Any, name: str) -> Any:
    expected = "a rule of tfscale.sync, such as tfscale.sync.DiLoCo(every=100), or None"
    rule: Rule = arguments.instance(sync, name, Rule, expected)
    refuse_wrong_lengths(rule.round_rule)
    return rule


def _slow_after(value: float, name: str) -> float:
    return checked_patience(DEADLINE, value)[1]


def _checked_weights_wire(value: Any, name: str) -> MethodPolicy:
    policy = wire_policy_of(value, name).with_feedback(False)
    others = [each for each in policy.methods if each.wires[0] not in WIRES_OF_WEIGHTS]
    if others:
        raise ValueError(
            f"{name}={value!r} sends weights as {str(others[0])!r}; expected "
            f"{' or '.join(map(repr, WIRES_OF_WEIGHTS))}. Name one of these, or set "
            "wire, which is for gradients"
        )
    return policy


def _checked_algorithm(value: Any, name: str) -> Any:
    if isinstance(value, (list, tuple)):
        hint = f"MirroredStrategy takes devices first; here pass devices={value!r}"
        raise arguments.wrong(value, name, "a name such as 'ring', or a Schedule", hint)
    return checked_algorithm(value, name, "auto")


_ALWAYS: dict[str, Callable[[Any, str], Any]] = {
    "algorithm": _checked_algorithm,
    "batch_norm": lambda value, name: arguments.choice(value, name, ("synchronized", "local")),
    "deadline": arguments.seconds,
    "slow_after": _slow_after,
    "join_timeout": arguments.seconds,
    "transport": checked_transport,
    "backend": lambda value, name: arguments.choice(value, name, backends.BACKENDS),
}
_UNLESS_NONE: dict[str, Callable[[Any, str], Any]] = {
    "cluster_resolver": checked_resolver,
    "sync": _checked_rule,
    "error_feedback": arguments.flag,
    "bucket_bytes": number_of_bytes,
    "schedule_file": arguments.path,
    "own_losses": lambda value, name: arguments.choice(value, name, CHOICES),
    "shard": lambda value, name: arguments.choice(value, name, (OPTIMIZER, ALL)),
    "weights_wire": _checked_weights_wire,
    "grid": lambda value, name: arguments.instance(value, name, Grid, _A_GRID),
    "tensor": rules.checked,
    "pipeline": lambda value, name: arguments.instance(value, name, Pipeline, _A_PIPELINE),
    "shares": shares.checked,
}


def _rule(sync: Rule | None, **of_gradients: Any) -> Rule:
    """Return the rule by which replicas agree.

    Args:
        sync: the user's argument ``sync``.
        of_gradients: arguments that say how the gradients of a step are sent.

    Raises:
        ValueError: the rule does not work with Keras 2, or with an argument for gradients.
    """
    sync = EveryStep() if sync is None else sync.simplest
    if isinstance(sync, EveryStep):
        return sync
    if KERAS_2:
        raise ValueError(
            f"sync={sync!r} needs Keras 3, but this program uses Keras 2. Install Keras 3; or "
            "leave sync out, and replicas agree after every step"
        )
    given = {name: value for name, value in of_gradients.items() if value is not None}
    if given and not sync.sums_gradients:
        said = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            f"{said} has no effect with sync={sync!r}: replicas send no gradients, but weights or "
            "differences of weights. Give the argument to the rule instead, such as "
            'sync=tfscale.sync.DiLoCo(every=100, wire="int8")'
        )
    return sync


def _refuse_unsharded(shard: str, policy: MethodPolicy, rule: Rule) -> None:
    """Raise if an argument does not work together with ``shard``."""
    given = f"shard={shard!r}"
    if KERAS_2:
        raise ValueError(f"{given} needs Keras 3, and this is Keras 2: leave shard out")
    if not isinstance(rule, EveryStep):
        raise ValueError(
            f"{given} shares out state that is the same on all replicas, and with sync={rule!r} "
            "each replica trains with its own state, or applies sums some steps later. Leave out "
            "one of the two"
        )
    others = [each for each in policy.methods if not isinstance(each, Wire)]
    if others:
        raise ValueError(
            f"{given} sends each replica its parts of the sums, on a wire, and {others[0]} "
            "computes whole sums. Name a wire, such as wire='int8', or leave shard out"
        )
    if shard == ALL and policy != MethodPolicy():
        raise ValueError(
            f"{given} sums gradients of weights in parts while the backward pass runs, as fp32, "
            f"and not by {policy!r}. Leave the wire out, or take shard='optimizer'"
        )


def _weights_policy(weights_wire: Any, shard: str | None, grid: Grid | None) -> MethodPolicy:
    """Return the wires of updated weights, or raise if replicas send no such weights."""
    if weights_wire is None:
        return MethodPolicy()
    given = f"weights_wire={weights_wire!r}"
    if shard != OPTIMIZER:
        raise ValueError(
            f"{given} is the format in which shard='optimizer' sends updated weights, and got "
            f"shard={shard!r}. Pass shard='optimizer', or leave weights_wire out"
        )
    if grid is not None and not grid.is_plain:
        raise ValueError(
            f"{given} does not work with grid={grid!r}, whose replicas send weights as fp32 within "
            "teams. Leave out one of the two"
        )
    return _checked_weights_wire(weights_wire, "weights_wire")


def _refuse_grid(
    grid: Grid | None, tensor: Mapping[str, str] | None, shard: str | None, rule: Rule
) -> None:
    """Raise if a grid, the rules of tensor parallelism and other arguments do not fit together."""
    size = 1 if grid is None else grid.tensor
    if tensor and size == 1:
        cuts = "activations" if rules.cuts_activations(tensor) else "weights"
        raise ValueError(
            f"tensor={tensor!r} cuts {cuts} into slices, and grid={grid!r} has one slice. Pass "
            "grid=tfscale.Grid(tensor=2), or leave tensor out"
        )
    if size > 1 and not tensor:
        raise ValueError(
            f"grid={grid!r} has {size} slices of each split weight, and no rule says which weights "
            'are split. Pass tensor={"ffn/up": "columns", "ffn/down": "rows"}, with patterns of '
            "your weights' paths, or leave the axis tensor out"
        )
    if grid is None or grid.is_plain:
        return
    if grid.experts > 1 and grid.team > 1:
        raise ValueError(
            f"grid={grid!r} shares experts out, and cuts models into stages or slices, too. This "
            "version does one of both: leave experts out, or stages and tensor"
        )
    if KERAS_2:
        raise ValueError(f"grid={grid!r} needs Keras 3, and this is Keras 2: leave grid out")
    if shard == ALL:
        raise ValueError(
            f"shard={shard!r} shares all weights out among all replicas, and grid={grid!r} cuts "
            "models otherwise: leave out one of the two, or take shard='optimizer'"
        )
    if rules.cuts_activations(tensor or {}) and (grid.stages > 1 or shard is not None):
        given = f"shard={shard!r}" if grid.stages == 1 else f"grid={grid!r}"
        raise ValueError(
            f"tensor={tensor!r} cuts activations along an axis, and with {given} this was never "
            "tried. Leave out one of the two"
        )
    if not isinstance(rule, EveryStep):
        raise ValueError(
            f"with grid={grid!r} replicas hold parts of one model and need each other in each "
            f"step, and with sync={rule!r} each replica trains alone. Leave out one of the two"
        )


def _refuse_pipeline(grid: Grid | None, pipeline: Pipeline | None) -> None:
    """Raise if a grid and a pipeline do not fit together."""
    stages = 1 if grid is None else grid.stages
    if pipeline is None:
        if stages > 1:
            raise ValueError(
                f"grid={grid!r} has {stages} stages, and nothing says how the model is cut. Pass "
                "pipeline=tfscale.Pipeline(microbatches=8), or leave stages out"
            )
        return
    if grid is None or stages == 1:
        raise ValueError(
            f"pipeline={pipeline!r} cuts models into stages, and grid={grid!r} has one stage. Pass "
            "grid=tfscale.Grid(stages=2), or leave pipeline out"
        )
    pipeline.order_of(stages)


def _refuse_shares(given: Any, grid: Grid | None, shard: str | None, rule: Rule) -> None:
    """Raise if an argument does not work together with ``shares``."""
    if given is None:
        return
    said = f"shares={given!r}"
    if KERAS_2:
        raise ValueError(f"{said} needs Keras 3, and this is Keras 2: leave shares out")
    if grid is not None and not grid.is_plain:
        raise ValueError(
            f"{said} does not work with grid={grid!r} yet: there replicas share a model, and need "
            "each other's rows. Leave out one of the two"
        )
    if not isinstance(rule, EveryStep) and not rule.bound:
        raise ValueError(
            f"{said} weights what replicas sum by their rows, and sync={rule!r} mixes weights of "
            "replicas, which all count equally. Leave out one of the two, or take "
            "sync=tfscale.sync.BoundedStaleness(8)"
        )
    if given == shares.MEASURED and rule.bound and rule.skips:
        raise ValueError(
            f"{said} gives a slow replica fewer rows, and sync={rule!r} leaves out its batches: "
            "each would undo what the other one measures. Leave out skips, or give numbers, such "
            "as shares=[3, 1]"
        )
    if given == shares.MEASURED and shard == ALL:
        raise ValueError(
            f"{said} measures how long a replica computes, and with shard={shard!r} it waits for "
            "weights while it computes. Give numbers instead, such as shares=[3, 1], or take "
            "shard='optimizer'"
        )


def _choices_of(schedule_file: Path) -> str:
    try:
        return records.read_text(schedule_file)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"schedule_file={str(schedule_file)!r} does not exist on this worker; each worker "
            "reads its own copy of the file. Write it with strategy.dump, and copy it to every host"
        ) from None
