"""Pictures hold what they should."""

import builtins

import numpy as np
import pytest

from tfscale import schedules
from tfscale.support import figures


def test_the_line_is_the_schedule(tmp_path):
    pytest.importorskip("matplotlib")
    schedule = schedules.Drops(
        0.1, at=[30, 60, 80], warmup=5, start=0.1, unit="epochs", base_batch=256
    )
    figure = schedule.for_batch(8192).plot()
    (axes,) = figure.axes
    times, rates = axes.lines[0].get_data()
    assert times[-1] == 90
    assert axes.get_xlabel() == "epochs"
    for epoch, rate in {2.5: 1.65, 20: 3.2, 70: 0.032}.items():
        assert np.interp(epoch, times, rates) == pytest.approx(rate, rel=1e-3)
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.Constant(1.0),
        schedules.Polynomial(1.0, end=10),
        schedules.Cosine(1.0, end=10, base_batch=256),
        schedules.InverseSquareRoot(1.0, warmup=4),
    ],
)
def test_every_curve_can_be_drawn_to_any_time(schedule):
    pytest.importorskip("matplotlib")
    assert schedule.plot().axes[0].get_xlim()[1] == schedule.horizon
    assert schedule.plot(until=7).axes[0].get_xlim()[1] == 7


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    figures.figure_class.cache_clear()
    with pytest.raises(ImportError, match="pip install matplotlib"):
        schedules.Constant(1.0).plot()
