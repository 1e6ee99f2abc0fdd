"""Spelling repair: from a misspelt word to the right one among all words of a list.

Pairs are made by random edits, so there are as many as a training reads. A word is the bag of its
letters, pairs and triples of letters, each hashed to a row of a table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST = 20
GRAMS = 8192  # rows of the table; row 0 is no letters
TABLE = 64  # columns of the table
_FOLDER = Path("/usr/share/dict")
_DEBIANS = ("american-english-insane", "american-english-huge", "american-english", "words")
_SYMSPELL = "frequency_dictionary_en_82_765.txt"


def load(path: Path | None = None, one_in: int = 1) -> Words:
    """Return the words of a list, or of the largest list that this machine has.

    Only words of 3 to 20 letters from a to z count.

    Args:
        path: the file of the list.
        one_in: number N, to take one word in N.

    Raises:
        OSError: if there is no list; the message says how to get one.
    """
    lines = _find(path).read_text(encoding="utf-8", errors="ignore").split("\n")
    words = {line.split(" ")[0].lower() for line in lines}
    kept = (w for w in words if 3 <= len(w) <= LONGEST and w.isascii() and w.isalpha())
    return Words(sorted(kept)[::one_in])


def _find(path: Path | None) -> Path:
    if path is not None:
        return path
    for name in _DEBIANS:
        if (_FOLDER / name).exists():
            return _FOLDER / name
    package = importlib.util.find_spec("symspellpy")
    if package is None or package.origin is None:
        raise OSError(
            "no list of words found: `sudo apt-get install wamerican-huge` (about 345,000), "
            "`sudo apt-get install wamerican-insane` (about 650,000) or `pip install symspellpy` "
            "(82,765) brings one, or name a file with --words"
        )
    return Path(package.origin).with_name(_SYMSPELL)


class Words:
    """Words as rows of letters, and their misspellings.

    Args:
        words: the words.
    """

    def __init__(self, words: list[str]) -> None:
        self.words, self.classes = words, len(words)
        self._letters = np.zeros([len(words), LONGEST + 2], np.int32)
        for row, word in zip(self._letters, words, strict=True):
            row[: len(word)] = [1 + LETTERS.index(letter) for letter in word]
        self._lengths = np.array([len(word) for word in words])

    def draw(self, rng: np.random.Generator, rows: int) -> tuple[Any, Any]:
        """Return grams of misspelt words [rows, n], and the numbers of the right words.

        Three quarters of the words have one edit, the others two.
        """
        labels = rng.integers(0, len(self.words), rows)
        letters, lengths = edited(self._letters[labels], self._lengths[labels], rng)
        again, _ = edited(letters, lengths, rng)
        letters = np.where(rng.random([rows, 1]) < 0.25, again, letters)
        return grams(letters), labels

    def trunk(self, width: int, table: int = TABLE) -> Callable[[], tuple[Any, Any]]:
        """Return a function that makes inputs and the last hidden layer."""
        return bag_of_rows(3 * (LONGEST + 2), GRAMS, width, table)


def edited(letters: Any, lengths: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    """Return words with one letter deleted, inserted, replaced, or swapped with the next."""
    rows, width = letters.shape
    kind = rng.integers(0, 4, rows)[:, None]
    place = (rng.random(rows) * lengths).astype(int)[:, None]
    columns = np.arange(width)[None]
    deleted, inserted, replaced, swapped = (kind == each for each in range(4))
    source = columns + (deleted & (columns >= place)) - (inserted & (columns > place))
    source += swapped & (columns == place) & (place + 1 < lengths[:, None])
    source -= swapped & (columns == place + 1) & (place + 1 < lengths[:, None])
    padded = np.pad(letters, [(0, 0), (0, 1)])
    found = np.take_along_axis(padded, source, 1)
    new = rng.integers(1, 1 + len(LETTERS), [rows, 1])
    found = np.where((columns == place) & (inserted | replaced), new, found)
    found[:, LONGEST:] = 0
    return found, np.clip(lengths + inserted[:, 0] - deleted[:, 0], 1, LONGEST)


def grams(letters: Any) -> Any:
    """Return the rows of the table for each word's letters, pairs and triples; 0 is none."""
    first = np.pad(letters, [(0, 0), (1, 0)], constant_values=27)[:, :-1].astype(np.int64)
    second, third = letters.astype(np.int64), np.roll(letters, -1, 1).astype(np.int64)
    codes = [second, 28 * first + second + 1000, 784 * first + 28 * second + third + 100_000]
    hashed = [1 + (code * 2_654_435_761 >> 7) % (GRAMS - 1) for code in codes]
    return np.concatenate([np.where(second > 0, h, 0) for h in hashed], 1).astype(np.int32)


def bag_of_rows(columns: int, rows: int, width: int, table: int) -> Callable[[], tuple[Any, Any]]:
    """Return a function that makes inputs, which are rows of a table, and the last hidden layer.

    Args:
        columns: number of inputs; row 0 of the table is nothing.
        rows: number of rows of the table.
        width: size of the last hidden layer.
        table: number of columns of the table.
    """
    import keras
    import tensorflow as tf

    class Bag(keras.layers.Layer):
        """Sum of the rows of a table.

        An embedding whose result is summed does the same, and writes all rows of a batch to memory,
        forwards and backwards. With 256 columns, MACH's step took 2.7 times as long.
        """

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=[rows, table], initializer="uniform", name="table")

        def call(self, x: Any) -> Any:
            places = tf.where(x > 0)
            return tf.sparse.segment_sum(
                tf.convert_to_tensor(self.table), tf.gather_nd(x, places),
                tf.cast(places[:, 0], tf.int32), num_segments=tf.shape(x)[0],
            )  # fmt: skip

        def compute_output_shape(self, shape: Any) -> Any:
            return shape[0], table

    def made() -> tuple[Any, Any]:
        inputs = keras.Input([columns], dtype="int32")
        bag = Bag(dtype="float32")(inputs)  # in bfloat16 the sum of many rows is not exact enough
        return inputs, keras.layers.Dense(width, "relu")(bag)

    return made
