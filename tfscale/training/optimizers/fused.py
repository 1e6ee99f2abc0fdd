"""The choice between a fused op and plain TensorFlow for each variable.

The native ops go through memory once for the norms and once for the update. They support variables
on a CPU and outside XLA; both implementations compute the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfscale.bridge.runtime import is_compiled_by_xla
from tfscale.native import library, optimizers
from tfscale.native.toolchain import BuildError


def choose(name: str, asked: bool | None, variable: Any) -> Callable[..., Any] | None:
    """Return the fused update of a variable, or None for the plain one.

    Args:
        name: name of a function in ``tfscale.native.optimizers``. The result takes the variable,
            its state, the gradient, a dictionary of numbers, and that function's keywords.
        asked: True raises if the op cannot be used, False never uses it, and None uses it if
            possible. If the library cannot be built, a warning says so once.
        variable: TensorFlow's variable, as an optimizer's ``update_step`` gets it.
    """
    if asked is False:
        return None
    if obstacle := _obstacle(variable):
        if asked:
            raise ValueError(
                f"fused=True, but {obstacle}. Use fused=None, which uses TensorFlow's ops there."
            )
        return None
    if trouble := library.trouble():
        if asked:
            raise BuildError(trouble)
        _tell_once(trouble)
        return None
    return functools.partial(_update, name)


def _update(name: str, *tensors_and_numbers: Any, **how: Any) -> None:
    *tensors, numbers = tensors_and_numbers
    packed = getattr(optimizers, f"{name}_numbers")(**numbers)
    getattr(optimizers, name)(*tensors, packed, **how)


def _obstacle(variable: Any) -> str:
    """Return why the op cannot update this variable here; empty if it can."""
    if variable.dtype not in optimizers.DTYPES:
        known = ", ".join(dtype.name for dtype in optimizers.DTYPES)
        return f"{variable.name} is {variable.dtype.name}, and the op is for {known}"
    if tf.DeviceSpec.from_string(variable.device or "").device_type != "CPU":
        return f"{variable.name} lives on {variable.device or 'no device'}, not on a CPU"
    if is_compiled_by_xla():
        return "XLA compiles this step, and it cannot call the op"
    return ""


@functools.cache
def _tell_once(trouble: str) -> None:
    logging.getLogger("tfscale").warning(
        "there is no native library, so optimizers use TensorFlow's ops, which compute the same "
        "and are slower: %s\nfused=False turns this warning off.",
        trouble,
    )
