"""Scikit-learn's handwritten digits, and models that learn them in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np

TRAINING = 1000  # of 1,797 images; the others are for the test


def load() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images and labels to train with and to test with; always the same ones."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.images[order, :, :, np.newaxis] / 16).astype(np.float32)
    y = data.target[order].astype(np.int32)
    return (x[:TRAINING], y[:TRAINING]), (x[TRAINING:], y[TRAINING:])
