"""Blocks of README and docs run unchanged, and print what the pages show."""

import argparse
import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT

from tests import warm
from tests.docs.page import BLOCK
from tfscale.tools import bench, cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SECONDS = 500  # many times what a page takes


@pytest.mark.one_in(7)
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda page: page.name
)
def test_python_blocks_run(page, start, tmp_path):
    """Run a page in a process of its own and an empty folder: it needs nothing from elsewhere.

    Cold, it is an interpreter that has imported nothing, as a reader's has.
    """
    pytest.importorskip("matplotlib")
    command = [str(ROOT / "tests" / "docs" / "page.py"), str(page)]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "docs" / "stubs")])}
    if start == "warm":
        ran = warm.run(command, environment=path, cwd=tmp_path, seconds=SECONDS)
    else:
        ran = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env={**os.environ, **path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS,
        )  # fmt: skip
    assert ran.returncode == 0, ran.stdout


def test_every_python_block_is_found():
    for page in PAGES:
        text = page.read_text()
        assert len(BLOCK.findall(text)) == text.count("```python"), page


# ---------------------------------------------------------------------- commands


def blocks(text):
    """Return the blocks that are not Python."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code.replace("\\\n", " ") for kind, code in found if kind not in ("python", "text")]


def within_sentences(text):
    """Words set as code."""
    return re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def commands(name, *places):
    """Words after a command's name, at the beginning of a line or of words set as code."""
    pattern = re.compile(rf"^(?:\w+=\S+ |sudo |RUN |&& )*{name} +([^#&|\n]*)", re.MULTILINE)
    return [
        (page.name, words)
        for page in PAGES
        for place in places
        for code in place(page.read_text())
        for words in pattern.findall(code)
    ]


def test_targets_of_make_exist():
    there = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [
        (page, words.split()[0])
        for page, words in commands("make", blocks, within_sentences)
        if "-C" not in words
    ]
    assert len(named) > 10
    assert not [(page, target) for page, target in named if target not in there]


def test_commands_of_tfscale_exist():
    for page, words in commands("tfscale", within_sentences):
        command, *rest = words.split()
        assert command in cli.COMMANDS, (page, command)
        if command == "bench" and rest and not rest[0].startswith("-"):
            assert rest[0] in bench.BENCHES, (page, rest)


class OptionsRead(Exception):
    """Nothing else is to be done."""


def test_commands_of_tfscale_take_the_options_shown(monkeypatch, capsys):
    read = argparse.ArgumentParser.parse_args

    def only_read(parser, words):
        read(parser, words)
        raise OptionsRead

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_read)
    named = commands("tfscale", blocks)
    assert len(named) > 40
    for page, words in named:
        with pytest.raises((OptionsRead, SystemExit)) as ended:
            cli.main(shlex.split(words.replace("...", "train.py")))
        message = capsys.readouterr().err
        assert ended.type is OptionsRead or not ended.value.code, (page, words, message)
