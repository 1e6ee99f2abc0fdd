"""Eigenvalues at the ends of a spectrum."""

from __future__ import annotations

import logging

import numpy as np

from tfscale.analysis.curvature.lanczos import Basis
from tfscale.analysis.curvature.matrix import SymmetricMatrix
from tfscale.analysis.curvature.results import Eigenvalues
from tfscale.support import arguments

_NOT_CONVERGED = (
    "eigenvalues of %s did not converge in %d products: the residual of %.6g is %.2g; expected "
    "at most %.2g. Raise limit, or memory for a larger basis"
)


def lanczos(
    operator: SymmetricMatrix,
    top: int = 1,
    bottom: int = 0,
    *,
    tolerance: float = 1e-4,
    limit: int = 500,
    seed: int = 0,
) -> Eigenvalues:
    r"""Return the largest and the smallest eigenvalues, by Lanczos's method with restarts.

    Products build a basis of the space of :math:`s, Hs, H^2 s, \dots`, in which the ends of the
    spectrum converge first. A full basis shrinks to its best vectors and grows again (thick
    restart). A pair (e, v) has the residual :math:`\|H v - e v\|`.

    An eigenvalue of multiplicity m may be found fewer than m times.

    Args:
        operator: a symmetric matrix.
        top: number of the largest eigenvalues to find.
        bottom: number of the smallest eigenvalues to find.
        tolerance: bound on the residuals, as a share of the largest absolute eigenvalue. Errors of
            eigenvalues are about the square of that, where there is a gap.
        limit: largest number of products; if they do not suffice, a warning reports the residual.
        seed: seed of the first vector.

    Reference: Wu, Simon, Thick-Restart Lanczos Method for Large Symmetric Eigenvalue
    Problems, 2000.
    """
    wanted = _wanted(operator, top, bottom)
    width = min(operator.size, max(2 * wanted + 18, 20))
    width = operator.check_memory(width + 1, "Lanczos's basis has", wanted + 4) - 1
    start = np.random.default_rng(seed).standard_normal(operator.size)
    basis, products = Basis(operator, width, start, seed), 0
    with operator.telling("eigenvalues", limit):
        while True:
            while basis.count < width and (products < limit or basis.count < wanted):
                basis.grow()
                products += 1
            count = basis.count
            values, rotation = np.linalg.eigh(basis.projected[:count, :count])
            ends = [*range(count - 1, count - 1 - top, -1), *range(bottom)]
            residuals = np.abs(basis.rest * rotation[-1, ends])
            bound = tolerance * float(np.abs(values).max())
            converged = bool(np.all(residuals <= bound))
            if converged or products >= limit or count == operator.size:
                break
            keep = _kept(count, top, bottom)
            basis.shrink(rotation[:, keep], values[keep])
    if not converged:
        worst = int(residuals.argmax())
        logging.getLogger("tfscale").warning(
            _NOT_CONVERGED, operator.name, products, values[ends[worst]], residuals[worst], bound
        )
    found = tuple(float(values[i]) for i in ends)
    return Eigenvalues(
        found[:top], found[top:], tuple(float(r) for r in residuals), products, converged,
        basis.combined(rotation[:, ends]),
    )  # fmt: skip


def _kept(count: int, top: int, bottom: int) -> list[int]:
    """Return the indices of the Ritz pairs to keep: the wanted ones and half of the rest."""
    spare = (count - top - bottom) // 2
    low = bottom + (spare * bottom) // (top + bottom)
    high = min(top + spare - (low - bottom), count - 1 - low)
    return [*range(low), *range(count - high, count)]


def block_power(
    operator: SymmetricMatrix,
    top: int = 1,
    bottom: int = 0,
    *,
    tolerance: float = 1e-4,
    limit: int = 2000,
    seed: int = 0,
) -> Eigenvalues:
    r"""Find eigenvalues by power iteration on a block: slow and simple, to check ``lanczos``.

    The block for the largest eigenvalues is multiplied by :math:`H + r I`, the block for the
    smallest by :math:`r I - H`, where r exceeds all absolute eigenvalues. The Rayleigh-Ritz
    procedure reads the eigenvalues from the block.

    Args:
        operator: a symmetric matrix.
        top: number of the largest eigenvalues to find.
        bottom: number of the smallest eigenvalues to find.
        tolerance: bound on the residuals, as a share of the largest absolute eigenvalue.
        limit: largest number of products; if they do not suffice, a warning reports the residual.
        seed: seed of the first vectors.
    """
    wanted = _wanted(operator, top, bottom)
    operator.check_memory(4 * (wanted + 2), "the block has")
    with operator.telling("eigenvalues", limit):
        ends = [(1, top), (-1, bottom)]
        parts = [_power(operator, sign, n, tolerance, limit, seed) for sign, n in ends if n]
    values, vectors, residuals, products, bounds = zip(*parts, strict=True)
    found, rest = np.concatenate(values), np.concatenate(residuals)
    converged = all(r.max() <= bound for r, bound in zip(residuals, bounds, strict=True))
    if not converged:
        worst = int(rest.argmax())
        logging.getLogger("tfscale").warning(
            _NOT_CONVERGED, operator.name, sum(products), found[worst], rest[worst], max(bounds)
        )
    numbers = tuple(float(value) for value in found)
    return Eigenvalues(
        numbers[:top], numbers[top:], tuple(float(r) for r in rest), sum(products), converged,
        np.concatenate(vectors),
    )  # fmt: skip


def _power(
    operator: SymmetricMatrix, sign: int, count: int, tolerance: float, limit: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, float]:
    """Return eigenvalues at one end, vectors, residuals, the number of products and the bound."""
    width = min(count + 2, operator.size)
    block = np.random.default_rng(seed).standard_normal((width, operator.size))
    products, shift = 0, 0.0
    while True:
        block = np.linalg.qr(block.T)[0].T
        images = operator.products(block.astype(operator.dtype))
        products += width
        values, rotation = np.linalg.eigh(sign * (block @ images.T))
        order = np.argsort(values)[::-1]
        block, images = rotation[:, order].T @ block, sign * (rotation[:, order].T @ images)
        values = values[order]
        residuals = np.linalg.norm(images - values[:, np.newaxis] * block, axis=1)[:count]
        # The longest image of an orthonormal block estimates the largest absolute eigenvalue.
        shift = max(shift, 1.1 * float(np.linalg.norm(images, axis=1).max()))
        bound = tolerance * float(np.abs(values).max())
        if residuals.max() <= bound or products >= limit:
            vectors = block[:count].astype(operator.dtype)
            return sign * values[:count], vectors, residuals, products, bound
        block = images + shift * block


def _wanted(operator: SymmetricMatrix, top: int, bottom: int) -> int:
    top, bottom = arguments.whole(top, "top", 0), arguments.whole(bottom, "bottom", 0)
    if not 1 <= top + bottom <= operator.size:
        raise ValueError(
            f"top and bottom are numbers of eigenvalues to find, together from 1 to "
            f"{operator.size}; got top={top!r} and bottom={bottom!r}"
        )
    return top + bottom
