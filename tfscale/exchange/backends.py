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


_NO_RESIDUAL = "TensorFlow's collectives do not return the rounding error"


def checked(backend: str, policy: MethodPolicy, error_feedback: bool | None, **engines: Any) -> str:
    """Return the backend, but ``"engine"`` for ``"auto"`` if a feature needs the engine.

    Raise ``ValueError`` if such a feature comes with ``backend="tensorflow"``.

    Args:
        backend: the user's choice.
        policy: the policy that says which method sums which gradient.
        error_feedback: the user's choice.
        engines: arguments that need the engine, unless they are None, or "auto" where that leaves
            the choice.
    """
    lacking = next(_lacking(policy, error_feedback, engines), None)
    if lacking is None or backend == ENGINE:
        return backend
    if backend == AUTO:
        return ENGINE
    raise ValueError(
        f"backend={backend!r} {lacking}. Leave out that setting, or use backend={ENGINE!r}"
    )


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
                f"cannot send the wire {unknown[0]!r}: TensorFlow's collectives add up numbers of "
                f"{', '.join(map(repr, WIRES))} only"
            )
        elif unknown:
            yield f"sends the results of {method} as {LOSSLESS!r} only, not as {unknown[0]!r}"
        elif isinstance(method, Wire) and method.feedback:
            yield f"has no error feedback, which {method!r} needs: {_NO_RESIDUAL}"
    if error_feedback:
        yield f"has no error feedback (error_feedback=True): {_NO_RESIDUAL}"
    for name, value in engines.items():
        if value is not None and (value != AUTO or name == "shares"):
            yield (
                f"runs TensorFlow's collectives, but {name}={value!r} needs tfscale's own "
                "collectives"
            )
