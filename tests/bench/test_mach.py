"""Spelling repair by MACH and others; the figures are in docs/benchmarks/mach.md."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfscale.tools.bench import definitions, mach, mach_task, mach_workers, spelling

WORDS = [a + b + c for a in ("ab", "tre", "os") for b in ("lin", "ta", "quer") for c in ("de", "o")]


def distance(one, other):
    """Return how many letters must be deleted, inserted, replaced or swapped with the next."""
    table = {(i, 0): i for i in range(len(one) + 1)} | {(0, j): j for j in range(len(other) + 1)}
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            differ = one[i - 1] != other[j - 1]
            found = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + differ)
            if i > 1 and j > 1 and one[i - 1] == other[j - 2] and one[i - 2] == other[j - 1]:
                found = min(found, table[i - 2, j - 2] + 1)
            table[i, j] = found
    return table[len(one), len(other)]


def read(row):
    return "".join(spelling.LETTERS[letter - 1] for letter in row if letter)


def test_an_edit_is_one_edit():
    words = spelling.Words(WORDS)
    rng = np.random.default_rng(0)
    for _ in range(20):
        letters, lengths = spelling.edited(words._letters, words._lengths, rng)
        for row, length, word in zip(letters, lengths, WORDS, strict=True):
            assert distance(read(row), word) <= 1 and len(read(row)) == length
            assert not row[len(read(row)) :].any()


def test_words_are_those_of_a_list(tmp_path):
    file = tmp_path / "words"
    file.write_text("Zebra\napple 99\nan\nit's\nnaïve\nantidisestablishmentarianism\napple\n")
    assert spelling.load(file).words == ["apple", "zebra"]


def test_without_a_list_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(spelling, "_FOLDER", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="apt-get install wamerican-huge"):
        spelling.load()
    assert mach.main([]) == 1
    assert mach.main(["--task", "definitions", "--words", str(tmp_path)]) == 1
    assert "apt-get install wordnet-base" in capsys.readouterr().err


ENTRY = "0000{} 03 n 01 thing 0 000 @ | {}\n"


def test_definitions_are_those_of_wordnets_files(tmp_path):
    """Each sample has a part of the words of its definition, and examples do not count."""
    for name in ("noun", "verb", "adj", "adv"):
        text = f'the first {name} of two; "such as none"', f"another {name}"
        entries = [ENTRY.format(i, each) for i, each in enumerate(text)]
        (tmp_path / f"data.{name}").write_text("  1 a line of the licence\n" + "".join(entries))
    found = definitions.load(tmp_path)
    assert found.classes == 8 and definitions.load(tmp_path, one_in=4).classes == 2
    x, y = found.draw(np.random.default_rng(0), 200)
    assert (x > 0).any(1).all() and set(y) == set(range(8))
    words = [set(row[row > 0]) for row in x]
    assert all(each <= set(found._rows[label]) for each, label in zip(words, y, strict=True))
    assert (found._rows[0] > 0).sum() == 5


@pytest.fixture
def few_words(tmp_path):
    file = tmp_path / "words"
    file.write_text("\n".join(WORDS))
    return ["--words", str(file), "--buckets", "8", "--repetitions", "2", "--width", "8"]


@pytest.mark.slow
def test_a_small_run(few_words, tmp_path, capsys):
    how = ["--seconds", "0.2", "--samples", "4", "--classes", "5000", "--parts", "task,search"]
    how += ["--json", str(tmp_path / "out"), "--serve", "--clock", "processor"]
    how += ["--precision", "bfloat16", "--table", "16"]
    assert mach.main([*few_words, *how]) == 0
    printed = capsys.readouterr().out
    assert "command: tfscale bench mach" in printed
    assert "ten best of 5,000 classes, R=2, B=8, 4 best buckets first, flat" in printed
    results = json.loads((tmp_path / "out").read_text())["task"]
    machs = [f"{name}, {by}" for name in ("mach", "shared") for by in mach_task.ESTIMATORS]
    assert [each["name"] for each in results] == [*machs, "full", "sampled"]
    assert [each["head"] for each in results] == [16 * 9] * 4 + [18 * 9] * 2
    assert all(each["steps"] > 0 and 0 <= each["top1"] <= each["top5"] for each in results)
    assert [bool(each["served"]) for each in results] == [False, True] * 2 + [False] * 2


def test_bytes_are_those_that_interfaces_have_sent():
    counters = """Inter-|   Receive                  |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes packets errs drop
    lo:     100       1    0    0    0     0          0         0      120       1    0    0
  eth0:       7       1    0    0    0     0          0         0        3       1    0    0
"""
    assert mach_workers.bytes_sent(counters) == 123


@pytest.mark.full
def test_workers_train_repetitions_and_send_nothing(few_words, tmp_path):
    how = ["--parts", "workers", "--steps", "2", "--rounds", "1", "--json", str(tmp_path / "out")]
    assert mach.main([*few_words, *how]) == 0
    rates = json.loads((tmp_path / "out").read_text())["workers"]
    assert [rate["name"].split(",")[0] for rate in rates] == ["1 worker", "1 worker", "2 workers"]
    assert all(rate["per_hour"][0] > 0 for rate in rates)
    counted = mach_workers.can_count()
    assert [rate["sent"] for rate in rates] == [0 if counted else None] * 3
