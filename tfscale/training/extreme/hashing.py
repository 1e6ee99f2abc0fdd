"""Hash functions from classes to buckets: the same on all machines and in all versions.

Repetition r maps a key x to the bucket ``((a x + b) mod p) mod buckets`` with ``p = 2^61 - 1``, the
family of Carter and Wegman (1979). Two different keys share a bucket with a probability of at most
``1 / buckets`` over the draw of ``a`` and ``b``, which BLAKE2b derives from the seed and r. The key
of a number is the number. The key of a text is the BLAKE2b of its UTF-8 bytes, modulo p.

Files name this family as ``FAMILY``. Whoever changes a bucket must change the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

FAMILY = "carter-wegman-2^61-1, blake2b"
PRIME = (1 << 61) - 1

_LOW = (1 << 31) - 1
Array = Any


def keys_of(classes: int | Sequence[str]) -> Array:
    """Return the keys of the classes 0 to n - 1, or of texts."""
    if isinstance(classes, int):
        return np.arange(classes, dtype=np.uint64)
    return np.array([_number(text.encode()) % PRIME for text in classes], np.uint64)


def coefficients(seed: int, repetition: int) -> tuple[int, int]:
    """Return ``a``, from 1 to p - 1, and ``b``, from 0 to p - 1."""
    name = f"tfscale.extreme {seed} {repetition}"
    return 1 + _number(f"{name} a".encode()) % (PRIME - 1), _number(f"{name} b".encode()) % PRIME


def buckets_of(keys: Array, buckets: int, seed: int, repetition: int) -> Array:
    """Return the bucket of each key in one repetition, as int32."""
    a, b = coefficients(seed, repetition)
    hashed = _reduced(_product(a, keys) + np.uint64(b))
    return (hashed % np.uint64(buckets)).astype(np.int32)


def _number(words: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(words, digest_size=16).digest(), "big")


def _product(a: int, x: Array) -> Array:
    """Return ``a x mod p`` for numbers below p, by parts of 31 bits, since uint64 is too small.

    With ``2^61 = 1 mod p``, the product ``h 2^62 + m 2^31 + l`` is ``2h + m 2^31 + l``.
    """
    a_high, a_low = np.uint64(a >> 31), np.uint64(a & _LOW)
    x_high, x_low = x >> np.uint64(31), x & np.uint64(_LOW)
    middle = a_high * x_low + a_low * x_high
    shifted = (middle >> np.uint64(30)) + ((middle & np.uint64(_LOW >> 1)) << np.uint64(31))
    return _reduced(np.uint64(2) * a_high * x_high + shifted + a_low * x_low)


def _reduced(x: Array) -> Array:
    """Return numbers of 64 bits modulo p."""
    folded = (x & np.uint64(PRIME)) + (x >> np.uint64(61))
    return np.where(folded >= PRIME, folded - np.uint64(PRIME), folded)
