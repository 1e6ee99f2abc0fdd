"""Methods of compression and sync rules, read from words of a command line."""

from __future__ import annotations

import argparse
import ast
import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tfscale.collectives.wires import WIRES

if TYPE_CHECKING:
    from tfscale.compression import Method
    from tfscale.sync import Rule

NAMES = ("PowerSGD", "TopK", "RandomK", "Wire", "Staged", "Settled", "Adaptive")
RULES = (
    "EveryStep", "LocalSGD", "DiLoCo", "ElasticAveraging", "BoundedStaleness", "Gossip",
    "Hierarchical",
)  # fmt: skip


def method_of(text: str) -> Method:
    """Return the method that a Python expression or the name of a wire describes.

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
    with _explained(text, f"a wire ({', '.join(WIRES)}) or a method, such as {examples}"):
        method: Method = _evaluated(ast.parse(text, mode="eval").body, compression, NAMES)
        if not isinstance(method, compression.Method):
            raise ValueError("it is neither a wire nor a method")
    return method


def rule_of(text: str) -> Rule:
    """Return the sync rule that a Python expression describes.

    Example:
        >>> rule_of("DiLoCo(100, wire='int8')").every
        100
    """
    from tfscale import sync  # imports TensorFlow

    with _explained(
        text, f"a rule: one of {', '.join(RULES)}, such as \"DiLoCo(100, wire='int8')\""
    ):
        rule = _evaluated(ast.parse(text, mode="eval").body, sync, RULES)
        if not isinstance(rule, sync.Rule):
            raise ValueError("it is not a sync rule")
    return rule


def rounds_of(text: str) -> Rule:
    """Return the sync rule that ends rounds: with groups, the rule between the groups."""
    return rule_of(text).round_rule


@contextlib.contextmanager
def _explained(text: str, expected: str) -> Iterator[None]:
    """Turn an error in a text into one that also says what was expected."""
    try:
        yield
    except (SyntaxError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}. Give {expected}") from error


def _evaluated(node: ast.expr, module: ModuleType, names: Sequence[str]) -> Any:
    """Evaluate an expression of literals and of calls of the given names of a module."""
    if isinstance(node, ast.Tuple):
        return tuple(_evaluated(each, module, names) for each in node.elts)
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    name = getattr(node.func, "id", "")
    if name not in names:
        raise ValueError(f"{name or 'this call'} is none of {', '.join(names)}")
    arguments = [_evaluated(each, module, names) for each in node.args]
    named = {str(each.arg): _evaluated(each.value, module, names) for each in node.keywords}
    return getattr(module, name)(*arguments, **named)


def checked(text: str) -> str:
    """Return the text unchanged if it describes a wire or a method; an argparse type."""
    if text not in WIRES:
        method_of(text)
    return text


def checked_rule(text: str) -> str:
    """Return the text unchanged if it describes a sync rule; an argparse type."""
    rule_of(text)
    return text
