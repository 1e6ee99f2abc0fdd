"""Methods of compression as words of a command line."""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING

from tfscale.wires import WIRES

if TYPE_CHECKING:
    from tfscale.compression import Method

NAMES = ("PowerSGD", "TopK", "RandomK", "Wire")


def method_of(text: str) -> Method:
    """A method from its name and arguments as Python has them, or from a wire's name.

    Example:
        >>> method_of("PowerSGD(4, factors='bf16')").factors
        'bf16'
    """
    from tfscale import compression  # imports TensorFlow

    if text in WIRES:
        return compression.Wire(text)
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or getattr(call.func, "id", "") not in NAMES:
            raise ValueError("that is neither a wire nor a method")
        arguments = [ast.literal_eval(each) for each in call.args]
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        kind = getattr(compression, call.func.id)  # type: ignore[attr-defined]
        method: Method = kind(*arguments, **named)
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}. Say a wire, {', '.join(WIRES)}, or a method, such as "
            "'PowerSGD(4)' or 'TopK(0.01)'"
        ) from error
    return method


def checked(text: str) -> str:
    """The same text, if it says a method."""
    if text not in WIRES:
        method_of(text)
    return text
