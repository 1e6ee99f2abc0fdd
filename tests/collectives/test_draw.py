"""Pictures hold what they should."""

from __future__ import annotations

import builtins

import pytest

from tfscale.collectives import ALGORITHMS, Cluster, Link, hierarchical, ring
from tfscale.support import figures


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 5, 12])
def test_every_algorithm_can_be_drawn(name: str, ranks: int, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    schedule = ALGORITHMS[name](ranks)
    figure = schedule.draw()
    (axes,) = figure.axes
    assert f"{ranks} ranks" in axes.get_title(loc="left")
    assert [label.get_text() for label in axes.get_yticklabels()][-1] == f"rank {ranks - 1}"
    assert len(axes.texts) == schedule.verify().messages  # one arrow for each message


def test_a_cluster_can_be_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    cluster = Cluster([2, 2], Link(1, 1), Link(5, 4))
    hierarchical([2, 2]).draw(cluster).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_without_matplotlib_it_says_what_to_install(monkeypatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    figures.figure_class.cache_clear()
    with pytest.raises(ImportError, match="pip install matplotlib"):
        ring(3).draw()
