"""Synthetic texts, and small models that learn them in seconds.

There are two kinds of texts: sentences of a language in which the last word and the first word of
a sentence decide which words can follow, and documents whose words depend on their subject.
"""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = 24  # vocabulary of the language
NEXT = (0.6, 0.25, 0.1, 0.05)  # probabilities of the words that can follow a word
LENGTH = 16  # words of a sentence
SENTENCES = 2000, 500  # for training and for the test

VOCABULARY = 2000  # words of documents
SUBJECTS = 20
ABOUT = 0.4  # share of a document's words that belong to its subject; other words are random
DOCUMENT = 12  # words of a document
DOCUMENTS = 4000, 2000  # for training and for the test


def sentences() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return words and the words that follow them, for training and for the test; always equal."""
    numbers = np.random.default_rng(0)
    following = [[numbers.permutation(WORDS)[: len(NEXT)] for _ in range(WORDS)] for _ in (0, 1)]
    text = numbers.integers(WORDS, size=(sum(SENTENCES), LENGTH + 1))
    moods = text[:, 0] % 2
    for i in range(1, LENGTH + 1):
        which = numbers.choice(len(NEXT), size=len(text), p=NEXT)
        text[:, i] = np.array(following)[moods, text[:, i - 1], which]
    text = text.astype(np.int32)
    return _divided(text[:, :-1], text[:, 1:], SENTENCES[0])


def beginnings(words: Any) -> Any:
    """Return keys that sort sentences by the parity of their first word, then by this word."""
    first = words[:, 0]
    return first % 2 * WORDS + first


def transformer(width: int = 32, heads: int = 2) -> Any:
    """Return a causal transformer of one block, which is not compiled."""
    import keras

    layers = keras.layers
    words = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(words), axis=1) - 1
    x = layers.Embedding(WORDS, width)(words) + layers.Embedding(LENGTH, width)(places)
    y = layers.LayerNormalization()(x)
    x += layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="relu")(y)
    x += layers.Dense(width)(y)
    return keras.Model(words, layers.Dense(WORDS)(layers.LayerNormalization()(x)))


def documents() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return words and subjects of documents, for training and for the test; always equal."""
    numbers = np.random.default_rng(0)
    count = sum(DOCUMENTS)
    often = 1 / np.arange(1, VOCABULARY + 1)
    words = numbers.choice(VOCABULARY, size=(count, DOCUMENT), p=often / often.sum())
    own = numbers.permutation(VOCABULARY).reshape(SUBJECTS, -1)
    subjects = numbers.integers(SUBJECTS, size=count).astype(np.int32)
    about = own[subjects[:, np.newaxis], numbers.integers(own.shape[1], size=words.shape)]
    words = np.where(numbers.random(words.shape) < ABOUT, about, words).astype(np.int32)
    return _divided(words, subjects, DOCUMENTS[0])


def embedding(width: int = 32) -> Any:
    """Return a model that averages the embeddings of a document's words; it is not compiled."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((DOCUMENT,), dtype="int32"),
            layers.Embedding(VOCABULARY, width),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(SUBJECTS),
        ]
    )


def _divided(x: Any, y: Any, training: int) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (x[:training], y[:training]), (x[training:], y[training:])
