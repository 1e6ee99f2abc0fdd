"""Whose collectives gradients go by: the engine's, or TensorFlow's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfscale.compression import WirePolicy
from tfscale.exchange.tensorflow_exchange import NAME, WIRES

AUTO, ENGINE, TENSORFLOW = "auto", "engine", NAME
BACKENDS = (AUTO, ENGINE, TENSORFLOW)


def checked(backend: str, policy: WirePolicy, error_feedback: bool | None, **engines: Any) -> str:
    """The same; ``"engine"`` for ``"auto"`` where something is asked for that TensorFlow's lack.

    Args:
        backend: as the user says it.
        policy: which gradient is sent on which wire.
        error_feedback: as the user says it.
        engines: arguments that ask something of the engine, unless they are None or "auto".
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    lacking = next(_lacking(policy, error_feedback, engines), None)
    if lacking is None or backend == ENGINE:
        return backend
    if backend == AUTO:
        return ENGINE
    raise ValueError(f"backend={backend!r} {lacking}. Leave that out, or use backend={ENGINE!r}")


def _lacking(
    policy: WirePolicy, error_feedback: bool | None, engines: dict[str, Any]
) -> Iterator[str]:
    for wire in policy.wires:
        if wire not in WIRES:
            yield (
                f"sends the wires {', '.join(map(repr, WIRES))}: TensorFlow's collectives cannot "
                f"add up numbers of {wire!r}"
            )
    if error_feedback:
        yield "has no error feedback (error_feedback=True): TensorFlow does not say what is lost"
    for name, value in engines.items():
        if value not in (None, AUTO):
            yield (
                f"leaves to TensorFlow how collectives run, and {name}={value!r} is about "
                "tfscale's own"
            )
