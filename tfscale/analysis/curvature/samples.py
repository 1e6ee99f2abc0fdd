"""Estimates of traces, diagonals and norms from random vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfscale.analysis.curvature.matrix import SymmetricMatrix
from tfscale.analysis.curvature.results import Diagonal, Estimate, Trace
from tfscale.support import arguments

AT_ONCE = 4  # vectors that share the loss and the gradient; more save little, and take memory
FEWEST = 8  # samples that are drawn before their spread decides when to stop

_FEWEST_OF_HUTCH = 6


def checked_samples(samples: int) -> int:
    """Return the number of random vectors, or raise."""
    return arguments.whole(samples, "samples", 1, what="a number of random vectors")


def random_signs(operator: SymmetricMatrix, seed: int, *sample: int) -> np.ndarray:
    """Return a vector of random signs for the numbers of a sample: the same on all workers."""
    bits = np.random.default_rng([seed, *sample]).integers(0, 2, operator.size, np.int8)
    return (2 * bits - 1).astype(operator.dtype)


def hutchinson(
    operator: SymmetricMatrix, samples: int = 64, *, accuracy: float | None = None, seed: int = 0
) -> Trace:
    r"""Estimate the trace, as the mean of :math:`z^T H z` over vectors z of random signs.

    :math:`E[z_i z_j]` is 1 for :math:`i = j` and 0 otherwise, so the mean is the trace. The terms
    of a layer's variables give the trace of its block. The variance of one sample is :math:`2
    \sum_{i \ne j} H_{ij}^2`.

    Args:
        operator: a symmetric matrix.
        samples: largest number of samples.
        accuracy: stop when the standard error is at most this share of the trace.
        seed: seed of the vectors.

    Reference: Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix for Laplacian
    Smoothing Splines, 1990.
    """
    terms: list[list[float]] = []

    def done() -> bool:
        return accuracy is not None and Estimate.of(np.sum(terms, 1)).is_within(accuracy)

    for z, product in products_of_signs(
        operator, "trace", samples, seed, lambda: bool(terms) and done()
    ):
        each = z * product
        terms.append([float(each[part].sum()) for part in operator.parts.values()])
    of_layer: dict[str, Any] = {}
    for path, numbers in zip(operator.parts, np.transpose(terms), strict=True):
        layer = operator.layer_of(path)
        of_layer[layer] = of_layer.get(layer, 0) + numbers
    layers = {layer: Estimate.of(numbers) for layer, numbers in of_layer.items()}
    return Trace(Estimate.of(np.sum(terms, 1)), layers, len(terms))


def hutch_plus_plus(operator: SymmetricMatrix, samples: int = 64, *, seed: int = 0) -> Trace:
    r"""Estimate the trace by Hutch++: exact for the large eigenvalues, sampled for the rest.

    A third of the products makes an orthonormal basis Q of the range of H, a third gives
    :math:`\mathrm{tr}(Q^T H Q)`, and a third is spent on :math:`z^T P H P z`, with :math:`P = I - Q
    Q^T`. If H is near a matrix of low rank, the error falls with 1 / samples, instead of 1 /
    sqrt(samples). Q takes the memory of a third of ``samples`` vectors.

    Args:
        operator: a symmetric matrix.
        samples: number of products, at least six.
        seed: seed of the vectors.

    Reference: Meyer, Musco, Musco, Woodruff, Hutch++: Optimal Stochastic Trace Estimation,
    https://arxiv.org/abs/2010.09649.
    """
    what = 'a number of products (two for each part of "hutch++"; "hutchinson" takes fewer)'
    samples = arguments.whole(samples, "samples", _FEWEST_OF_HUTCH, what=what)
    third = min(samples // 3, operator.size)
    operator.check_memory(2 * third, "Hutch++ keeps")
    probes = (random_signs(operator, seed, sample) for sample in range(2 * third))
    with operator.telling("trace", 3 * third):
        sketch = operator.products(np.stack([next(probes) for _ in range(third)]))
        basis = np.linalg.qr(sketch.T)[0].T.astype(operator.dtype)
        exact = float(np.sum(basis * operator.products(basis)))
        rest = []
        for z in probes:
            z = z - (basis @ z) @ basis
            rest.append(float(z @ operator.products(z[np.newaxis])[0]))
    found = Estimate.of(np.array(rest))
    return Trace(Estimate(exact + found.value, found.error, found.samples), {}, 3 * third)


def diagonal(operator: SymmetricMatrix, samples: int = 64, *, seed: int = 0) -> Diagonal:
    r"""Estimate the diagonal, as the mean of :math:`z \odot (H z)` over vectors z of random signs.

    The variance of one sample of number i is :math:`\sum_{j \ne i} H_{ij}^2`.

    Args:
        operator: a symmetric matrix.
        samples: number of samples.
        seed: seed of the vectors.

    Reference: Bekas, Kokiopoulou, Saad, An Estimator for the Diagonal of a Matrix, 2007.
    """
    mean, squares, count = np.zeros(operator.size), np.zeros(operator.size), 0
    for z, product in products_of_signs(operator, "diagonal", samples, seed):
        count += 1
        each = z * product
        step = each - mean
        mean += step / count
        squares += step * (each - mean)
    errors = np.sqrt(squares / (count - 1) / count) if count > 1 else np.full_like(mean, np.nan)
    means = {path: float(mean[part].mean()) for path, part in operator.parts.items()}
    return Diagonal(means, count, mean, errors)


def frobenius(operator: SymmetricMatrix, samples: int = 64, *, seed: int = 0) -> Estimate:
    r"""Estimate the Frobenius norm, the root of the mean of :math:`\|H z\|^2`.

    Args:
        operator: a symmetric matrix.
        samples: number of samples.
        seed: seed of the vectors.
    """
    products = products_of_signs(operator, "norm", samples, seed)
    square = Estimate.of(np.array([float(product @ product) for _, product in products]))
    norm = float(np.sqrt(square.value))
    return Estimate(norm, square.error / (2 * norm) if norm else 0.0, square.samples)


def products_of_signs(
    operator: SymmetricMatrix,
    what: str,
    samples: int,
    seed: int,
    done: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random signs and their products, until there are enough.

    Args:
        operator: a symmetric matrix.
        what: name of the estimate, for the progress bar.
        samples: largest number of samples.
        seed: seed of the vectors.
        done: says before each few products whether there are enough.
    """
    samples = checked_samples(samples)
    arguments.whole(seed, "seed", 0)
    with operator.telling(what, samples):
        for first in range(0, samples, AT_ONCE):
            if first >= FEWEST and done():
                return
            numbers = range(first, min(first + AT_ONCE, samples))
            probes = np.stack([random_signs(operator, seed, number) for number in numbers])
            yield from zip(probes, operator.products(probes), strict=True)
