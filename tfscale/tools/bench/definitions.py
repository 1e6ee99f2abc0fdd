"""Reverse dictionary: from some words of a definition to the entry of WordNet that it defines.

A sample has each word of a definition with a probability of one half, and at least one. So there
are as many samples as a training reads, and a test sees other halves. A word is a row of a table.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.tools.bench.spelling import TABLE, bag_of_rows

ROWS = 32768  # of the table; row 0 is no word
LONGEST = 24  # words of a definition that count
_FOLDER = Path("/usr/share/wordnet")
_FILES = ("data.noun", "data.verb", "data.adj", "data.adv")
_WORD = re.compile("[a-z]+")


def load(path: Path | None = None, one_in: int = 1) -> Definitions:
    """Return WordNet's entries with their definitions.

    Args:
        path: the folder of WordNet's database.
        one_in: number N, to take one entry in N.

    Raises:
        OSError: if it is not there; the message says how to get it.
    """
    folder = path or _FOLDER
    missing = [name for name in _FILES if not (folder / name).exists()]
    if missing:
        raise OSError(
            f"{folder} has no {missing[0]}: `sudo apt-get install wordnet-base` brings WordNet "
            "(117,659 entries), or name its folder with --words"
        )
    lines = [line for name in _FILES for line in (folder / name).read_text().splitlines()]
    entries = (line.partition("|")[2] for line in lines if not line.startswith(" "))
    texts = [text.partition('; "')[0] for text in entries]  # without examples
    return Definitions(texts[::one_in])


class Definitions:
    """Definitions as rows of words.

    Args:
        texts: the definitions; the number of each is its class.
    """

    def __init__(self, texts: list[str]) -> None:
        self.classes = len(texts)
        self._rows = np.zeros([len(texts), LONGEST], np.int32)
        for row, text in zip(self._rows, texts, strict=True):
            found = list(dict.fromkeys(_WORD.findall(text.lower())))[:LONGEST]
            row[: len(found)] = [1 + zlib.crc32(word.encode()) % (ROWS - 1) for word in found]

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        """Return rows of words [rows, n], and the numbers of the definitions."""
        labels = rng.integers(0, self.classes, rows)
        found = self._rows[labels]
        kept = rng.random(found.shape) < 0.5
        kept[:, 0] |= ~(kept & (found > 0)).any(1)
        return np.where(kept, found, 0), labels

    def trunk(self, width: int, table: int = TABLE) -> Callable[[], tuple[Any, Any]]:
        """Return a function that makes inputs and the last hidden layer."""
        return bag_of_rows(LONGEST, ROWS, width, table)
