"""Comparison of a training on replicas with one on one device."""

from __future__ import annotations

import numpy as np


def spread(expected, found, relative):
    """The largest difference; of numbers above one as a share of them, where that is asked."""
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:
        return f"has shape {found.shape}, one device has {expected.shape}"
    size = np.maximum(1, np.abs(expected)) if relative else 1
    return float(np.max(np.abs(found - expected) / size, initial=0))


def spreads(expected, record):
    """Return the difference of each variable and each number that both have."""
    for kind in ("weights", "seen"):
        for name in sorted(expected[kind].keys() & record[kind].keys()):
            relative = kind == "seen"
            yield kind, name, spread(expected[kind][name], record[kind][name], relative)


def largest(expected, record):
    """Return the largest difference of a training that has passed."""
    return max(wrong for _, _, wrong in spreads(expected, record))


def differences(case, expected, record):
    """Sentences; none when all is the same."""
    for kind in ("weights", "seen"):
        for name in sorted(expected[kind].keys() ^ record[kind].keys()):
            yield f"{kind} {name}: only {'one device' if name in expected[kind] else 'replicas'}"
    for kind, name, wrong in spreads(expected, record):
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
