"""Spelling repair by MACH and others; the figures are in docs/benchmarks/mach.md."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tfscale.tools.bench import mach, spelling

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
    assert spelling.load(file) == ["apple", "zebra"]


def test_without_a_list_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(spelling, "_FOLDER", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="apt-get install wamerican-huge"):
        spelling.load()
    assert mach.main([]) == 1


def test_a_small_run(tmp_path, capsys):
    file = tmp_path / "words"
    file.write_text("\n".join(WORDS))
    words = ["--words", str(file), "--seconds", "0.2", "--buckets", "8", "--repetitions", "2"]
    words += ["--width", "8", "--samples", "4", "--search", "5000", "--json", str(tmp_path / "out")]
    assert mach.main(words) == 0
    printed = capsys.readouterr().out
    assert "command: tfscale bench mach" in printed
    assert "ten best of 5,000 classes, R=2, B=8, candidates=4" in printed
    results = json.loads((tmp_path / "out").read_text())
    machs = [f"{name}, {by}" for name in ("mach", "shared") for by in mach.ESTIMATORS]
    assert [each["name"] for each in results] == [*machs, "full", "sampled"]
    assert [each["head"] for each in results] == [16 * 9] * 4 + [18 * 9] * 2
    assert all(each["steps"] > 0 and 0 <= each["top1"] <= each["top5"] for each in results)
