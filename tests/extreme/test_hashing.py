"""Buckets of classes: the same everywhere, as evenly as chance, apart as the bound says."""

import itertools

import numpy as np
import pytest

from tfscale.extreme import repetitions_needed
from tfscale.training.extreme.hashing import PRIME, buckets_of, coefficients, keys_of

GOLDEN = {
    "numbers": [[672, 728, 784, 840, 896, 952], [628, 196, 813, 381, 949, 517]],
    "texts": [[772, 423, 46], [323, 655, 320]],
}


def test_buckets_stay_as_files_have_them():
    """A change of these buckets breaks all folders that users have, so FAMILY must change."""
    assert [buckets_of(keys_of(6), 1000, 7, r).tolist() for r in (0, 3)] == GOLDEN["numbers"]
    words = ["able", "Zürich", "日本"]
    assert [buckets_of(keys_of(words), 1000, 7, r).tolist() for r in (0, 3)] == GOLDEN["texts"]


@pytest.mark.parametrize("buckets", [2, 3, 1000, 1 << 24])
def test_products_of_122_bits_are_exact(buckets):
    rng = np.random.default_rng(0)
    keys = np.append(rng.integers(0, PRIME, 2000, np.uint64), [0, 1, PRIME - 1, PRIME - 2])
    keys = keys.astype(np.uint64)
    for repetition in range(4):
        a, b = coefficients(3, repetition)
        assert 0 < a < PRIME and 0 <= b < PRIME
        by_python = [(a * int(key) + b) % PRIME % buckets for key in keys]
        assert buckets_of(keys, buckets, 3, repetition).tolist() == by_python


def test_pairs_collide_as_often_as_in_a_universal_family():
    """Two classes share a bucket in 1 of B draws: 600 draws of 190 pairs, in standard errors."""
    buckets, draws = 8, 600
    tables = np.stack([buckets_of(keys_of(20), buckets, seed, 0) for seed in range(draws)])
    pairs = list(itertools.combinations(range(20), 2))
    shares = np.array([(tables[:, i] == tables[:, j]).mean() for i, j in pairs])
    error = np.sqrt(1 / buckets * (1 - 1 / buckets) / draws)
    assert abs(shares.mean() - 1 / buckets) < 3 * error
    assert abs(shares - 1 / buckets).max() < 5 * error


def test_repetitions_keep_classes_apart_as_often_as_the_bound_says():
    classes, buckets, confusion = 1000, 32, 0.05
    repetitions, bad = repetitions_needed(classes, buckets, confusion), 0
    for seed in range(400):
        tables = np.stack(
            [buckets_of(keys_of(classes), buckets, seed, r) for r in range(repetitions)]
        )
        bad += len(np.unique(tables.T, axis=0)) < classes
    assert bad <= 400 * confusion


def test_classes_fill_buckets_evenly():
    for keys in (keys_of(50_000), keys_of([f"w{i}" for i in range(50_000)])):
        counts = np.bincount(buckets_of(keys, 50, 0, 0), minlength=50)
        assert abs(counts - 1000).max() < 200  # 6 standard deviations of a random function
