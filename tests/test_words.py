"""Docstrings are plain sentences: the rules of docs/contributing.md, as a lint.

In tests a function may also begin with a noun: "The sum" names a fixture, or tells what happens.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# First words of docstrings that need their neighbours to be understood. The list grows.
FRAGMENT = re.compile(
    r"(?i)(of|by|on|in|at|as|to|from|for|with|within|without|until|while|if|because|beside|besides"
    r"|where|when|what|which|who|whoever|whose|whom|why|how|whatever"
    r"|those|these|that|this|it|its|they|their|theirs|there|nobody"
    r"|the same|same|likewise|instead of|and|or|but|so|not|also|else|than|like|called)\b"
)
# First words of a function's docstring that are no verb: "The sum" instead of "Return the sum".
NO_VERB = re.compile(r"(?i)(the|a|an|all|some|each|every|one|true|false|none|\d+)\b")
# Descriptions of arguments and attributes that need the name before them: "seed: of the vectors".
NO_NOUN = re.compile(
    r"    \*{0,2}\w[\w, ]*: (of|that|by(?! default\b)|those|likewise|the same|so many|whose)\b"
)

FRAGMENT_RULE = "begins with a fragment; write a sentence that is clear by itself"
VERB_RULE = "does not begin with a verb; write what the function does: Return, Sum, Raise"
NOUN_RULE = "describes an argument by a fragment; say what it is: 'seed: seed of the vectors'"

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Finding(NamedTuple):
    """A docstring that breaks a rule."""

    place: str
    words: str
    rule: str

    def __str__(self) -> str:
        return f"{self.place}: {self.words!r} {self.rule}"


def is_property(node):
    return any(re.search(r"property\b", ast.unparse(each)) for each in node.decorator_list)


def broken_rules(node):
    """Yield the offset of a line in a docstring, the line, and the rule that it breaks."""
    first, *others = ast.get_docstring(node).split("\n")
    if FRAGMENT.match(first):
        yield 0, first, FRAGMENT_RULE
    elif isinstance(node, DEFINITIONS) and not is_property(node) and NO_VERB.match(first):
        yield 0, first, VERB_RULE
    for offset, line in enumerate(others, 1):
        if NO_NOUN.match(line):
            yield offset, line.strip(), NOUN_RULE


def findings_in(text, place="text", rules=(FRAGMENT_RULE, VERB_RULE, NOUN_RULE)):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *DEFINITIONS)) and ast.get_docstring(node):
            begin = node.body[0].lineno
            for offset, words, rule in broken_rules(node):
                if rule in rules:
                    yield Finding(f"{place}:{begin + offset}", words, rule)


@pytest.mark.parametrize(
    ("folder", "rules"),
    [
        ("tfscale", (FRAGMENT_RULE, VERB_RULE, NOUN_RULE)),
        ("docs", (FRAGMENT_RULE, VERB_RULE, NOUN_RULE)),
        ("tests", (FRAGMENT_RULE, NOUN_RULE)),
    ],
)
def test_docstrings_are_plain_sentences(folder, rules):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    each = (findings_in(file.read_text(), file.relative_to(ROOT), rules) for file in files)
    found = [str(finding) for of_file in each for finding in of_file]
    assert not found, "\n".join(["docstrings that break docs/contributing.md's rules:", *found])


def of_function(words):
    return f'def f():\n    """{words}"""\n'


def of_property(words):
    return f'class A:\n    """A thing."""\n    @property\n    def f(self):\n        """{words}"""\n'


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (of_function("Of all replicas the sum."), FRAGMENT_RULE),
        (of_function("The same, if it is one."), FRAGMENT_RULE),
        (of_function("What is sent of a gradient."), FRAGMENT_RULE),
        (of_function("Called by Keras."), FRAGMENT_RULE),
        (of_function("The sum over all replicas."), VERB_RULE),
        (of_property("By which the bucket is summed."), FRAGMENT_RULE),
        ('class A:\n    """Those of one model."""\n', FRAGMENT_RULE),
        ('"""How files are written."""\n', FRAGMENT_RULE),
        (of_function("Draw.\n\n    Args:\n        seed: of the vectors.\n    "), NOUN_RULE),
    ],
)
def test_the_lint_finds_fragments(text, rule):
    (found,) = findings_in(text)
    assert found.rule == rule


def test_a_finding_says_where_it_is():
    text = of_function("Draw.\n\n    Args:\n        seed: of the vectors.\n    ")
    (found,) = findings_in(text, "tfscale/sync/rule.py")
    assert str(found).startswith("tfscale/sync/rule.py:5: 'seed: of the vectors.' describes")


@pytest.mark.parametrize(
    "text",
    [
        of_function("Return the sum over all replicas."),
        of_function("Raise if the data changed between two passes."),
        of_function("Send half.\n\n    Args:\n        seed: seed of the vectors.\n    "),
        of_function("Plot.\n\n    Args:\n        width: by default a hundredth.\n    "),
        of_property("The sum over all replicas."),
        of_property("Whether a path is local."),
        of_function("Whether a path is local."),
        'class A:\n    """A sum over all replicas."""\n',
        'class A:\n    """Offset of a line."""\n',
        '"""Forward passes of a model."""\n',
    ],
)
def test_the_lint_leaves_sentences_alone(text):
    assert not list(findings_in(text))


def test_no_page_holds_both_sides_of_a_merge():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    marked = [p for p in pages if re.search(r"^(<{7}|>{7}) ", p.read_text(), re.MULTILINE)]
    assert pages and not marked
