"""Methods of compression as words of a command line."""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from tfscale.wires import WIRES

if TYPE_CHECKING:
    from tfscale.compression import Method

NAMES = ("PowerSGD", "TopK", "RandomK", "Wire", "Staged", "Settled")


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
        method: Method = _made(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}. Say a wire, {', '.join(WIRES)}, or a method, such as "
            "'PowerSGD(4)' or 'TopK(0.01)'"
        ) from error
    return method


def _made(call: ast.expr) -> Method:
    """Of a method's name and its arguments, among which there may be other methods."""
    from tfscale import compression

    if not isinstance(call, ast.Call) or getattr(call.func, "id", "") not in NAMES:
        raise ValueError("that is neither a wire nor a method")

    def value(each: ast.expr) -> Any:
        return _made(each) if isinstance(each, ast.Call) else ast.literal_eval(each)

    named = {str(each.arg): value(each.value) for each in call.keywords}
    kind = getattr(compression, call.func.id)  # type: ignore[attr-defined]
    return kind(*map(value, call.args), **named)  # type: ignore[no-any-return]


def checked(text: str) -> str:
    """The same text, if it says a method."""
    if text not in WIRES:
        method_of(text)
    return text
