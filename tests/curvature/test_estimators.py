"""Estimators on matrices that are known: what they find, and whether their error bars are right."""

import json
import logging

import numpy as np
import pytest

from tests.curvature.matrices import Known, covered, spread
from tfscale.analysis.curvature.results import student

MATRIX = spread()
VALUES = np.linalg.eigvalsh(MATRIX)[::-1]


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_eigenvalues_at_both_ends(method):
    found = Known(MATRIX).eigenvalues(top=3, bottom=2, method=method, limit=20_000)
    assert found.converged
    np.testing.assert_allclose(found.top, VALUES[:3], 1e-6)
    np.testing.assert_allclose(found.bottom, VALUES[:-3:-1], 1e-4)
    for value, vector, residual in zip(found.values, found.vectors, found.residuals, strict=True):
        np.testing.assert_allclose(np.linalg.norm(vector), 1)
        off = np.linalg.norm(MATRIX @ vector - value * vector)
        np.testing.assert_allclose(off, residual, atol=1e-9)


def test_a_basis_that_is_restarted_finds_the_same():
    matrix = spread(400)
    small = Known(matrix, memory=25 * 400 * 8)
    found = small.eigenvalues(top=5, bottom=5, limit=3000)
    assert found.converged and found.products > 25
    values = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(found.top, values[:-6:-1], 1e-4)
    np.testing.assert_allclose(found.bottom, values[:5], 1e-4)


def test_all_eigenvalues_of_a_small_matrix_and_of_a_multiple_of_one():
    np.testing.assert_allclose(Known(MATRIX[:4, :4]).eigenvalues(top=4).top,
                               np.linalg.eigvalsh(MATRIX[:4, :4])[::-1])  # fmt: skip
    assert Known(3 * np.eye(30)).eigenvalues(top=2).top == pytest.approx((3, 3))
    assert Known(np.zeros((30, 30))).eigenvalues(top=1).top == (0,)


def test_what_does_not_converge_says_so(caplog):
    with caplog.at_level(logging.WARNING, "tfscale"):
        found = Known(spread(400)).eigenvalues(top=10, limit=12)
    assert not found.converged and found.products == 12
    assert "did not converge in 12 products" in caplog.text


def test_a_basis_that_memory_does_not_hold_is_refused_before_it_is_made():
    with pytest.raises(ValueError, match="81 vectors of 400 numbers.*raise memory"):
        Known(spread(400), memory=10_000).density(steps=80)


def test_traces_and_their_layers():
    operator = Known(MATRIX)
    found = operator.trace(4000)
    assert abs(found.value - MATRIX.trace()) < 4 * found.total.error
    for name, part in (("first", slice(0, 30)), ("second", slice(30, 60))):
        estimate = found.layers[name]
        assert abs(estimate.value - MATRIX[part, part].trace()) < 4 * estimate.error
    assert operator.trace(4000, accuracy=0.1).total.samples < 4000
    diagonal = operator.diagonal(2000)
    off = np.abs(diagonal.values - np.diag(MATRIX)) / diagonal.errors
    assert off.max() < 5 and 0.5 < np.sqrt(np.mean(off**2)) < 1.5


def test_hutch_plus_plus_is_exact_where_the_rank_is_low():
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((60, 60)))[0][:, :5]
    low = (basis * [5, 4, 3, 2, 1]) @ basis.T
    assert Known(low).trace(30, method="hutch++").value == pytest.approx(15)


def test_hutch_plus_plus_takes_six_samples():
    assert np.isfinite(Known(MATRIX).trace(6, method="hutch++").value)
    with pytest.raises(ValueError, match="samples is .*hutchinson.*6 or more; got 5"):
        Known(MATRIX).trace(5, method="hutch++")


def test_the_density_has_the_moments_of_the_spectrum():
    density = Known(MATRIX).density(probes=40, steps=60)
    for power in (1, 2, 3):
        found = density.mean_of(lambda x, p=power: x**p)
        assert abs(found.value - np.mean(VALUES**power)) < 4 * found.error
    share = density.share(below=0.0)
    assert abs(share.value - np.mean(VALUES < 0)) < 4 * share.error


@pytest.mark.full
@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_traces_are_within_their_error_bars(method):
    """Ask for 90 of 100: with 95%, fewer are found in one of 28 cases."""
    found = [Known(MATRIX).trace(30, method=method, seed=seed).total for seed in range(100)]
    assert covered(found, MATRIX.trace()) >= 90


@pytest.mark.full
def test_densities_are_within_their_error_bars():
    matrix = spread(300)
    values = np.linalg.eigvalsh(matrix)
    found = [Known(matrix).density(probes=8, steps=80, seed=seed) for seed in range(100)]
    for number in (0.0, 0.5, 1.0):
        shares = [each.share(above=number) for each in found]
        assert covered(shares, np.mean(values > number)) >= 90, number
    for point in (-0.5, 0.0, 0.2):

        def near(x, point=point):
            return np.exp(-0.5 * ((x - point) / 0.1) ** 2)

        assert covered([each.mean_of(near) for each in found], near(values).mean()) >= 90, point


def test_shares_around_eigenvalues_that_come_many_times():
    """Equal eigenvalues are one node, on one side; the error includes that few steps hide which."""
    operator = Known(np.diag(np.repeat([-0.1, 0.0, 0.002, 1.0], 30)))
    few, enough = (operator.density(probes=4, steps=steps) for steps in (2, 4))
    share = few.share(above=0.001, below=0.5)
    assert abs(share.value - 0.25) <= share.error and share.error > 0.1
    share = enough.share(above=0.001, below=0.5)
    assert share.value == pytest.approx(0.25) and share.error < 1e-9
    assert enough.share().value == 1
    for nothing in (enough.share(below=-0.2), enough.share(above=1.1)):
        assert nothing.value == pytest.approx(0, abs=1e-9)


def test_quantiles_of_student():
    """Against tables."""
    known = {1: 12.706, 2: 4.303, 3: 3.182, 5: 2.571, 7: 2.365, 30: 2.042, 1000: 1.962}
    for degrees, quantile in known.items():
        assert student(0.95, degrees) == pytest.approx(quantile, rel=0.01)


def test_results_are_saved_and_printed(tmp_path):
    operator = Known(MATRIX)
    results = [
        operator.trace(8), operator.diagonal(8), operator.eigenvalues(top=2), operator.density(2, 9)
    ]  # fmt: skip
    for result in results:
        result.save(tmp_path / "result.json")
        saved = json.loads((tmp_path / "result.json").read_text())
        assert saved["kind"] == type(result).__name__ and "vectors" not in saved
        assert str(result).splitlines()[0]


def test_scipy_takes_it():
    eigsh = pytest.importorskip("scipy.sparse.linalg").eigsh
    found = eigsh(Known(MATRIX).as_linear_operator(), 3, return_eigenvectors=False)
    np.testing.assert_allclose(sorted(found), sorted(VALUES, key=abs)[-3:], 1e-8)


def test_a_density_is_drawn():
    pytest.importorskip("matplotlib")
    figure = Known(MATRIX).density(2, 20).plot()
    assert figure._repr_png_()[:4] == b"\x89PNG"
