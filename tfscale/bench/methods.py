"""Methods of compression as words of a command line."""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from tfscale.wires import WIRES

if TYPE_CHECKING:
    from tfscale.compression import Method

NAMES = ("PowerSGD", "TopK", "RandomK", "Wire", "Staged", "Settled", "Adaptive")


def method_of(text: str) -> Method:
    """A method from its name and arguments as Python has them, or from a wire's name.

    Example:
        >>> method_of("PowerSGD(4, factors='bf16')").factors
        'bf16'
    """
    from tfscale import compression  # imports TensorFlow

    if text in WIRES:
        return compression.Wire(text)
    if text == "adaptive":
        return compression.Adaptive()
    try:
        method: Method = _made(ast.parse(text, mode="eval").body)
        if not isinstance(method, compression.Method):
            raise ValueError("that is neither a wire nor a method")
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: {error}. Say a wire, {', '.join(WIRES)}, or a method, such as "
            "'PowerSGD(4)' or 'TopK(0.01)'"
        ) from error
    return method


def _made(node: ast.expr) -> Any:
    """What Python makes of it, of literals and of these names alone."""
    from tfscale import compression

    if isinstance(node, ast.Tuple):
        return tuple(map(_made, node.elts))
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = getattr(node.func, "id", "")
    if name not in NAMES:
        raise ValueError(f"{name or 'that'} is no method")
    named = {str(each.arg): _made(each.value) for each in node.keywords}
    return getattr(compression, name)(*map(_made, node.args), **named)


def checked(text: str) -> str:
    """The same text, if it says a method."""
    if text not in WIRES:
        method_of(text)
    return text
