"""``tfscale bench first``: what it prints, and that our graphs are not much larger than stock's."""

import io

import pytest
from rich.console import Console

from tfscale.tools.bench import first

# Operations of ours for each one of MirroredStrategy's, which say on every machine alike what
# tracing costs. Ours synchronizes batch normalization and weights losses, MirroredStrategy neither.
MOST = {"resnet50": 0.97, "transformer": 0.98, "gan": 1.09}


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m == "gan" else pytest.mark.full) for m in MOST]
)
def test_a_step_has_about_as_many_operations_as_stock(model):
    stock, ours = (first.measure(model, each, 2) for each in first.STRATEGIES)
    assert ours.operations <= MOST[model] * stock.operations
    assert all(step.cpu > step.later for step in (stock, ours))


def test_the_table_compares_with_stock():
    steps = {
        first.MIRRORED: [first.FirstStep(10.0, 5.0, 0.1, 1000)],
        first.SCALE: [first.FirstStep(9.0, 4.0, 0.1, 1100)],
    }
    console = Console(file=io.StringIO(), width=100)
    console.print(first.make_table(2, {"gan": steps}))
    told = [line.split() for line in console.file.getvalue().splitlines() if "gan" in line]
    assert told == [
        ["gan", "MirroredStrategy", "10.0", "1.00", "5.0", "1,000", "0.10"],
        ["gan", "ScaleStrategy", "9.0", "0.90", "4.0", "1,100", "0.10"],
    ]
