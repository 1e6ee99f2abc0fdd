"""Each message that the FAQ explains is still said, by tfscale or Keras."""

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
from helpers import ROOT

PAGE = (ROOT / "docs" / "faq.md").read_text()
MESSAGES = re.findall(r"^### `(.*)`$", PAGE, re.MULTILINE)
# What other packages say, and where.
OTHERS = {"keras": "src/trainers/epoch_iterator.py"}
GAP = "\0"  # where a message has a name or a number
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def templates_of_python(source):
    """Every text of a module but its docstrings, with gaps for what is put in while it runs."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if node in docstrings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def statements_of_cpp(source):
    """The texts of each statement, with gaps for what stands between them."""
    joined = re.sub(r'"\s*\n\s*"', "", source)
    for statement in joined.split(";\n"):
        yield GAP.join(LITERAL.findall(statement))


@functools.cache
def said():
    """All messages, one after the other."""
    found = []
    for path in (ROOT / "tfscale").rglob("*.py"):
        found += templates_of_python(path.read_text())
    for path in (ROOT / "custom_ops").rglob("*.cc"):
        found += statements_of_cpp(path.read_text())
    for package, path in OTHERS.items():
        origin = importlib.util.find_spec(package).origin
        found += templates_of_python((Path(origin).parent / path).read_text())
    return [re.sub(r"\s+", " ", text) for text in found]


def pattern_of(message):
    return re.compile(".*".join(map(re.escape, message.split("..."))))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_faq_is_still_said(message):
    pattern = pattern_of(message)
    assert any(pattern.search(text) for text in said())


def test_messages_that_nobody_says_are_noticed():
    assert len(MESSAGES) >= 20 and len(set(MESSAGES)) == len(MESSAGES)
    assert not any(pattern_of("a message ... that nobody says").search(text) for text in said())
