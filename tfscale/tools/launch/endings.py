"""Describes to a user how a process ended."""

from __future__ import annotations

import signal

_NATIVE = (
    ", as native code does when its memory is damaged or a check fails. Convolutions of oneDNN are "
    "a known cause: see whether the program ends well with TF_ENABLE_ONEDNN_OPTS=0"
)
_CAUSES = {
    signal.SIGKILL: ", as the kernel does when memory is short",
    signal.SIGSEGV: _NATIVE,
    signal.SIGABRT: _NATIVE,
}


def describe(code: int) -> str:
    """Return how a process ended, by its exit status or minus the number of a signal."""
    if code >= 0:
        return f"exited with {code}"
    if -code not in {each.value for each in signal.Signals}:
        return f"was killed by signal {-code}"
    number = signal.Signals(-code)
    return f"was killed by {number.name}{_CAUSES.get(number, '')}"
