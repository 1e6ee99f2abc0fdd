"""Estimators by enumeration, and the best classes against brute force."""

import itertools
import resource

import numpy as np
import pytest
import tensorflow as tf

from tfscale.native import library
from tfscale.native.toolchain import BuildError
from tfscale.training.extreme import search as searching
from tfscale.training.extreme.estimators import ESTIMATORS, combined, scaled, values_of
from tfscale.training.extreme.hashing import buckets_of, keys_of
from tfscale.training.extreme.search import Search


def table_of(classes, buckets, repetitions, seed=0):
    return np.stack([buckets_of(keys_of(classes), buckets, seed, r) for r in range(repetitions)])


def brute(values, table, estimator):
    """Scores of all classes [samples, classes] in float64."""
    values = np.stack([v[:, t] for v, t in zip(np.asarray(values, np.float64), table, strict=True)])
    buckets = 1 + table.max()
    return {
        "mean": lambda: values.mean(0),
        "unbiased": lambda: (values.mean(0) - 1 / buckets) * buckets / (buckets - 1),
        "min": lambda: values.min(0),
        "median": lambda: np.median(values, axis=0),
        "logits": lambda: values.sum(0),
    }[estimator]()


def test_the_estimator_is_unbiased_over_all_functions():
    """All 3^4 functions from 4 classes to 3 buckets, with two repetitions drawn independently."""
    true, buckets = np.array([0.5, 0.3, 0.15, 0.05]), 3
    values = []
    for function in itertools.product(range(buckets), repeat=4):
        in_buckets = np.bincount(function, true, buckets)
        values.append(in_buckets[list(function)])
    pairs = np.array([[a, b] for a in values for b in values]).transpose(0, 2, 1)
    scores = scaled(combined(tf.constant(pairs), "unbiased"), "unbiased", buckets, 2)
    assert np.allclose(scores.numpy().mean(0), true, atol=1e-12)


def test_the_estimator_is_unbiased_over_the_family():
    true, buckets, draws = np.array([0.5, 0.3, 0.1, 0.06, 0.04]), 4, 2000
    scores = []
    for seed in range(draws):
        function = buckets_of(keys_of(5), buckets, seed, 0)
        in_buckets = np.bincount(function, true, buckets)[function]
        scores.append(scaled(in_buckets, "unbiased", buckets, 1))
    error = np.std(scores, axis=0) / np.sqrt(draws)
    assert (abs(np.mean(scores, axis=0) - true) < 3 * error).all()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("candidates", [0, 2, 5, None])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("peak", [0, 12])
def test_the_best_are_those_of_brute_force(estimator, candidates, peak, monkeypatch):
    """Blocks are small and do not divide the number of classes; 70 samples are two parts."""
    monkeypatch.setattr(searching, "_ELEMENTS", 64 * 400)
    monkeypatch.setattr(searching, "_LARGE", 0)
    classes, buckets, repetitions, samples, k = 3001, 40, 5, 70, 7
    table = table_of(classes, buckets, repetitions)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal([repetitions, samples, buckets]).astype("float32")
    true = rng.integers(0, classes, samples)
    for r in range(repetitions):
        logits[r, np.arange(samples), table[r, true]] += peak
    values = values_of(tf.constant(logits), estimator, False)
    scores, labels = Search(table, buckets, estimator).top(values, k, candidates)
    expected = brute(values, table, estimator)
    best = -np.sort(-expected, axis=1)[:, :k]
    assert np.allclose(scores, best, rtol=1e-5, atol=1e-7)
    assert np.allclose(np.take_along_axis(expected, labels, 1), best, rtol=1e-5, atol=1e-7)
    assert all(len(set(row)) == k for row in labels.tolist())


def test_the_search_in_cpp_adds_in_the_order_of_repetitions(monkeypatch):
    """Scores and the order of equal ones are those of a stable sort, bit for bit."""
    monkeypatch.setattr(searching, "_LARGE", 0)
    classes, buckets, repetitions, samples, k = 20_000, 300, 7, 130, 12
    table = table_of(classes, buckets, repetitions)
    rng = np.random.default_rng(0)
    for logits in (
        rng.standard_normal([repetitions, samples, buckets]),
        rng.integers(0, 9, [repetitions, samples, buckets]),
    ):
        values = logits.astype("float32")
        sums = np.zeros([samples, classes], "float32")
        for row, of in zip(values, table, strict=True):
            sums += row[:, of]
        order = np.argsort(-sums, axis=1, kind="stable")[:, :k]
        scores, labels = Search(table, buckets, "logits").top(tf.constant(values), k)
        assert (labels == order).all()
        assert (scores == np.take_along_axis(sums, order, 1)).all()


@pytest.fixture
def no_library(monkeypatch):
    """Pretend that the machine has no compiler."""

    def load():
        raise BuildError("there is no compiler; install g++\nand other lines")

    monkeypatch.setattr(library, "load", load)
    for cached in (library.trouble, searching._warn_once):
        cached.cache_clear()
    yield
    for cached in (library.trouble, searching._warn_once):
        cached.cache_clear()


def test_without_a_library_tensorflow_searches_and_a_warning_says_so(
    no_library, monkeypatch, caplog
):
    monkeypatch.setattr(searching, "_LARGE", 0)
    search = Search(table_of(500, 20, 3), 20, "mean")
    values = tf.nn.softmax(tf.random.stateless_normal([3, 5, 20], [1, 2]))
    found = [search.top(values, 4, candidates)[1].tolist() for candidates in (None, None, 0)]
    assert found[0] == found[1] == found[2]
    assert caplog.text.count("there is no compiler") == 1
    why = "there is no native library: there is no compiler; install g++"
    assert searching.obstacle(500, 3, "mean") == why


def test_what_the_search_in_cpp_is_not_for():
    assert searching.obstacle(10**6, 16, "unbiased") is None
    assert searching.obstacle(10**6, 16, "median") == "scores by 'median' are no sums"
    assert "more than 256" in searching.obstacle(10**6, 257, "mean")
    assert "few" in searching.obstacle(1000, 16, "mean")


def test_the_op_refuses_other_shapes_and_places():
    from tfscale.native.search import best_classes

    values, places = tf.zeros([2, 3, 4]), tf.constant([[0, 4], [3, 7]])
    assert best_classes(values, places, 2)[1].numpy().tolist() == [[0, 1]] * 3
    assert best_classes(values[:, :0], places, 2)[1].shape == [0, 2]
    for wrong, k, words in (
        (places[:, :1], 1, "expected .repetitions,samples,buckets. and .classes,repetitions."),
        (places, 3, "k is 3, of 2 classes"),
        (places + 1, 1, "not one of the 4 buckets of its repetition"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            best_classes(values, wrong, k)


def test_equal_scores_come_by_class(monkeypatch):
    monkeypatch.setattr(searching, "_LARGE", 0)
    table = table_of(1000, 4, 2)
    for candidates in (0, 1, None):
        _, labels = Search(table, 4, "mean").top(tf.fill([2, 3, 4], 0.25), 5, candidates)
        assert labels.tolist() == [list(range(5))] * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scores_of_what_is_not_a_number_are_none(estimator, monkeypatch):
    """One sample's outputs are NaN in one repetition: the others have their answers."""
    monkeypatch.setattr(searching, "_LARGE", 0)
    search = Search(table_of(300, 20, 3), 20, estimator)
    logits = tf.random.stateless_normal([3, 5, 20], [1, 2]).numpy()
    good = [search.top(values_of(logits, estimator, False), 4, c)[0] for c in (0, 2, None)]
    logits[1, 2] = np.nan
    for candidates, expected in zip((0, 2, None), good, strict=True):
        scores, _ = search.top(values_of(logits, estimator, False), 4, candidates)
        assert np.isnan(scores[2]).all()
        assert np.array_equal(np.delete(scores, 2, 0), np.delete(expected, 2, 0))


def test_few_candidates_are_less_than_k():
    table = table_of(60, 50, 1)
    values = tf.nn.softmax(tf.random.stateless_normal([1, 3, 50], [1, 2]))
    for candidates in (0, 1, None):
        _, labels = Search(table, 50, "mean").top(values, 60, candidates)
        assert sorted(labels[0]) == list(range(60))


def test_peaked_scores_are_proven_by_candidates():
    """Most samples need no look at all classes, or the search would save nothing."""
    table = table_of(20_000, 200, 8)
    logits = np.zeros([8, 30, 200], "float32")
    for r in range(8):
        for rank, step in enumerate((0, 100, 200)):
            logits[r, np.arange(30), table[r, np.arange(30) * 7 + step]] += 12 - 3 * rank
    search = Search(table, 200, "mean")
    search.top(tf.nn.softmax(logits), 1, 4)
    *_, proven = search._traced(search._best_buckets, 1, 4)(tf.nn.softmax(logits))
    assert proven.numpy().mean() > 0.9


def test_memory_is_bounded_by_blocks():
    """A matrix of classes times samples would take 512 MB here."""
    classes, samples = 1_000_000, 128
    table = np.random.default_rng(0).integers(0, 500, [2, classes], np.int32)
    values = tf.nn.softmax(tf.random.stateless_normal([2, samples, 500], [1, 2]))
    search = Search(table, 500, "mean")
    library.load()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for candidates in (0, None):
        search.top(values, 10, candidates)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000  # kB
