"""Choice of the backend that sums gradients: the engine's collectives, or TensorFlow's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfscale.collectives.wires import LOSSLESS
from tfscale.compression.method import Wire
from tfscale.compression.policy import MethodPolicy
from tfscale.compression.switching import Switching
from tfscale.exchange.tensorflow_team import NAME, WIRES

AUTO, ENGINE, TENSORFLOW = "auto", "engine", NAME
BACKENDS = (AUTO, ENGINE, TENSORFLOW)


_NO_RESIDUAL = "TensorFlow does not say what is lost"


def checked(backend: str, policy: MethodPolicy, error_feedback: bool | None, **engines: Any) -> str:
    """Return the backend, but ``"engine"`` for ``"auto"`` if a feature needs the engine.

    Raise ``ValueError`` if such a feature comes with ``backend="tensorflow"``.

    Args:
        backend: the user's choice.
        policy: the policy that says which method sums which gradient.
        error_feedback: the user's choice.
        engines: arguments that need the engine, unless they are None or "auto".
    """
    lacking = next(_lacking(policy, error_feedback, engines), None)
    if lacking is None or backend == ENGINE:
        return backend
    if backend == AUTO:
        return ENGINE
    raise ValueError(f"backend={backend!r} {lacking}. Leave that out, or use backend={ENGINE!r}")


def _lacking(
    policy: MethodPolicy, error_feedback: bool | None, engines: dict[str, Any]
) -> Iterator[str]:
    for method in policy.methods:
        if isinstance(method, Switching):
            yield f"cannot change the method while it trains, as {method!r} does"
        known = WIRES if isinstance(method, Wire) else (LOSSLESS,)
        unknown = [wire for wire in method.wires if wire not in known]
        if unknown and isinstance(method, Wire):
            yield (
                f"sends the wires {', '.join(map(repr, WIRES))}: TensorFlow's collectives cannot "
                f"add up numbers of {unknown[0]!r}"
            )
        elif unknown:
            yield f"sends what {method} makes of gradients as {LOSSLESS!r} only"
        elif isinstance(method, Wire) and method.feedback:
            yield f"has no error feedback, as {method!r} has: {_NO_RESIDUAL}"
    if error_feedback:
        yield f"has no error feedback (error_feedback=True): {_NO_RESIDUAL}"
    for name, value in engines.items():
        if value not in (None, AUTO):
            yield (
                f"leaves to TensorFlow how collectives run, and {name}={value!r} is about "
                "tfscale's own"
            )
