"""Comparison of a training on replicas with one on one device."""

from __future__ import annotations

import numpy as np


def spread(expected, found, size):
    """Return the largest difference, as a share of what ``size`` makes of ``expected``."""
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:
        return f"has shape {found.shape}, one device has {expected.shape}"
    return float(np.max(np.abs(found - expected) / size(expected), initial=0))


def one(expected):
    return 1


def each_above_one(expected):
    return np.maximum(1, np.abs(expected))


def largest_above_one(expected):
    return max(1, np.max(np.abs(expected), initial=0))


def spreads(expected, record, logits=()):
    """Return the difference of each variable and each number that both have.

    Args:
        expected: what one device has left.
        record: what a worker has left.
        logits: names of arrays whose numbers are sums of larger ones: a difference counts as a
            share of the largest number of the array.
    """
    for kind in ("weights", "seen"):
        for name in sorted(expected[kind].keys() & record[kind].keys()):
            size = one if kind == "weights" else each_above_one
            size = largest_above_one if name in logits else size
            yield kind, name, spread(expected[kind][name], record[kind][name], size)


def largest(expected, record, logits=()):
    """Return the largest difference of a training that has passed."""
    return max(wrong for _, _, wrong in spreads(expected, record, logits))


def differences(case, expected, record):
    """Sentences; none when all is the same."""
    for kind in ("weights", "seen"):
        for name in sorted(expected[kind].keys() ^ record[kind].keys()):
            yield f"{kind} {name}: only {'one device' if name in expected[kind] else 'replicas'}"
    for kind, name, wrong in spreads(expected, record, getattr(case, "logits", ())):
        if isinstance(wrong, str) or not wrong <= case.may(name):
            yield f"{kind} {name}: off by {wrong}, {case.may(name)} may"


def unequal(records):
    """The variables whose bits are not the same on all replicas of all workers."""
    for name in records[0]["digests"]:
        found = [digest for record in records for digest in record["digests"][name]]
        if len(set(found)) > 1:
            yield f"{name}: {found}"


def wrongs(case, expected, found):
    """All that is wrong with what the workers tell of a case."""
    for worker, record in enumerate(found):
        if "error" in record:
            yield f"worker {worker}: {record['error']}"
    if any("error" in record for record in found):
        return
    yield from (f"replicas have other bits: {line}" for line in unequal(found))
    for worker, record in enumerate(found):
        for line in differences(case, expected, record):
            yield f"worker {worker} of {len(found)}: {line}"


def check(case, expected, found):
    """Assert that nothing is."""
    wrong = list(wrongs(case, expected, found))
    assert not wrong, "\n".join(wrong)
