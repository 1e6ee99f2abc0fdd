"""Methods of compression, and rules of when replicas agree, as words of a command line."""

from __future__ import annotations

import argparse
import ast
import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfscale.wires import WIRES

if TYPE_CHECKING:
    from tfscale.compression import Method
    from tfscale.sync import Hierarchical, Rule

NAMES = ("PowerSGD", "TopK", "RandomK", "Wire", "Staged", "Settled", "Adaptive")
RULES = ("EveryStep", "LocalSGD", "DiLoCo", "ElasticAveraging", "Gossip", "Hierarchical")


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
    examples = "'PowerSGD(4)' or 'TopK(0.01)'"
    with _explained(text, f"a wire, {', '.join(WIRES)}, or a method, such as {examples}"):
        method: Method = _made(ast.parse(text, mode="eval").body, compression, NAMES)
        if not isinstance(method, compression.Method):
            raise ValueError("that is neither a wire nor a method")
    return method


def rule_of(text: str) -> Rule | Hierarchical:
    """A rule of when replicas agree, from its name and arguments as Python has them.

    Example:
        >>> rule_of("DiLoCo(100, wire='int8')").every
        100
    """
    from tfscale import sync  # imports TensorFlow

    with _explained(text, f"a rule, such as \"DiLoCo(100, wire='int8')\", of {', '.join(RULES)}"):
        rule = _made(ast.parse(text, mode="eval").body, sync, RULES)
        if not isinstance(rule, (sync.Rule, sync.Hierarchical)):
            raise ValueError("that is no rule")
    return rule


def rounds_of(text: str) -> Rule:
    """Return the rule by which rounds end: between groups, if the text says groups."""
    from tfscale.sync.hierarchical import rule_of_rounds  # imports TensorFlow

    return rule_of_rounds(rule_of(text))


@contextlib.contextmanager
def _explained(text: str, expected: str) -> Iterator[None]:
    """What is wrong with a text is told together with what to say instead."""
    try:
        yield
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}. Say {expected}") from error


def _made(node: ast.expr, module: ModuleType, names: Sequence[str]) -> Any:
    """What Python makes of it, of literals and of these names of a module alone."""
    if isinstance(node, ast.Tuple):
        return tuple(_made(each, module, names) for each in node.elts)
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = getattr(node.func, "id", "")
    if name not in names:
        raise ValueError(f"{name or 'that'} is none of {', '.join(names)}")
    arguments = [_made(each, module, names) for each in node.args]
    named = {str(each.arg): _made(each.value, module, names) for each in node.keywords}
    return getattr(module, name)(*arguments, **named)


def checked(text: str) -> str:
    """The same text, if it says a method."""
    if text not in WIRES:
        method_of(text)
    return text


def checked_rule(text: str) -> str:
    """The same text, if it says a rule."""
    rule_of(text)
    return text
