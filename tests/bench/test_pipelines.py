"""``tfscale bench pipelines``, on a few steps, and what it makes of sleeps."""

import pytest

from tfscale.parallel.pipeline import ORDERS
from tfscale.plan.pipelines import Times, Work, gpipe, simulate
from tfscale.tools.bench import pipelines
from tfscale.tools.bench.pipelines import Slept, live_of, seen_in


def slept_in(order):
    """The sleeps of a simulated step, several times."""
    found = [[] for _ in range(order.ranks)]
    for step in range(pipelines.WARM_UP + 1):
        for box in simulate(order, Times(1, 1, 1), boxes=True).boxes:
            begin, end = box.start + 100 * step, box.end + 100 * step
            if box.turn.work is Work.BACKWARD:
                middle = (begin + end) / 2
                found[box.rank] += [Slept("I", begin, middle), Slept("W", middle, end)]
            else:
                found[box.rank].append(Slept(box.turn.work.value, begin, end))
    return [sorted(each, key=lambda one: one.begin) for each in found]


@pytest.mark.parametrize("name", ORDERS)
def test_what_a_simulation_shows_is_found_again(name):
    order = ORDERS[name](4, 8)
    seen = seen_in(slept_in(order), order, pipelines.WARM_UP + 1)
    assert seen.idle == pytest.approx(simulate(order, Times(1, 1, 1)).idle_share)
    assert seen.live == live_of(order)


@pytest.mark.full
def test_it_prints_a_row_for_each_order(capsys):
    options = ["--orders", "gpipe", "--stages", "2", "--microbatches", "3", "--ms", "2"]
    assert pipelines.main([*options, "--steps", "4", "--parts", "idle,delays"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith("gpipe")]
    assert len(rows) == 2, printed
    assert rows[0][1] == "4" and rows[0][3] == f"{simulate(gpipe(2, 3)).idle_share:.1%}"
    assert rows[0][4:] == ["3", "3", "3", "3"] and rows[1][2:] == ["3", "3", "3", "3"], printed
