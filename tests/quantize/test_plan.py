"""Plans: limits, pins, ties, the front, files, and what is refused."""

import json

import keras
import pytest

from tests.quantize import nets
from tfscale import quantize
from tfscale.support.records import RecordError


@pytest.fixture(scope="module")
def study():
    """A study of three dense layers of 30, 36 and 12 numbers."""
    return nets.study()


FIRST, SECOND, LAST = "net/first", "net/second", "net/last"
TIMES = {path: {2: 3e-6, 4: 1e-6, 8: 2e-6} for path in (FIRST, SECOND, LAST)}


def test_a_size_is_kept_and_used(study):
    plan = quantize.plan(study, size="12.5%")
    assert plan.bytes <= 78 * 4 * 0.125 and plan.proven
    best = min(
        sum(study[path].cost(b) for path, b in zip((FIRST, SECOND, LAST), bits, strict=True))
        for bits in [(a, b, c) for a in (2, 4, 8) for b in (2, 4, 8) for c in (2, 4, 8)]
        if 30 * bits[0] + 36 * bits[1] + 12 * bits[2] <= 78 * 4
    )
    assert plan.cost == pytest.approx(best)
    assert plan.bits == {layer.path: layer.bits for layer in plan.layers}


def test_a_size_in_bytes(study):
    assert quantize.plan(study, size=78 * 2 / 8).bytes == 78 * 2 / 8
    assert quantize.plan(study, size="1kB").bytes == 78
    assert quantize.plan(study, (4, 32), size="1kB").bytes == 78 * 4


def test_several_limits_at_once(study):
    plan = quantize.plan(
        study, size="20%", bops="4%", latency="85%", table=TIMES, last=8, activations=8
    )
    products = 78
    assert plan.bits[LAST] == 8
    assert plan.bit_operations <= 0.04 * products * 32 * 32
    assert plan.bit_operations == sum(one.numbers * one.bits * 8 for one in plan.layers)
    assert plan.latency <= 0.85 * 6e-6
    assert set(plan.limits) == {"size", "bops", "latency"}


def test_pinned_layers_and_ties(study):
    plan = quantize.plan(study, (2, 4), size="20%", first=8, pinned={LAST: 8})
    assert (plan.bits[FIRST], plan.bits[LAST]) == (8, 8) and plan.bits[SECOND] in (2, 4)
    tied = quantize.plan(study, size="15%", ties=[[FIRST, SECOND]])
    assert tied.bits[FIRST] == tied.bits[SECOND]


@pytest.mark.slow
def test_sums_are_tied():
    model = nets.mixed()
    found = quantize.sensitivity(model, *nets.data(), by="error", trained=True, bits=(2, 4, 8))
    for size in ("8%", "10%", "14%", "18%"):
        plan = quantize.plan(found, size=size, ties="sums")
        assert plan.bits["branch"] == plan.bits["down"]


def test_the_front_goes_from_the_smallest_to_the_widest(study):
    front = quantize.front(study, points=12)
    sizes = [one.bytes for one in front.plans]
    costs = [one.cost for one in front.plans]
    assert sizes == sorted(set(sizes)) and costs == sorted(set(costs), reverse=True)
    assert (sizes[0], sizes[-1]) == (78 * 2 / 8, 78)
    assert str(front).count("\n") == len(front.plans) - 1


def test_pictures(study):
    pytest.importorskip("matplotlib")
    plan = quantize.plan(study, size="12.5%")
    front = quantize.front(study, points=3)
    assert [len(one.draw().axes) for one in (study, plan, front)] == [1, 2, 1]


def test_a_plan_prints_its_proof_limits_and_layers(study):
    printed = str(quantize.plan(study, size="12.5%"))
    assert "no choice of widths has less; size at most 39 B" in printed
    assert all(path in printed for path in (FIRST, SECOND, LAST))


# ------------------------------------------------------------------- files


def test_a_plan_is_saved_and_read_for_its_model(study, tmp_path):
    plan = quantize.plan(study, size="20%", latency=1e-5, table=TIMES, activations=8)
    plan.save(tmp_path / "bits.json")
    model, *_ = nets.dense(trained=False)
    assert quantize.Plan.load(tmp_path / "bits.json", model) == plan


def test_a_plan_for_another_model_is_refused(study, tmp_path):
    quantize.plan(study, size="20%").save(tmp_path / "bits.json")
    names = ("first", "other", "last")
    other = keras.Sequential(
        [keras.Input([5]), *(keras.layers.Dense(6, name=name) for name in names)], name="net"
    )
    with pytest.raises(ValueError) as error:
        quantize.Plan.load(tmp_path / "bits.json", other)
    for words in (
        "it has no 'net/second'", "'net/other' is not in the plan",
        "'net/last' has the shapes ((6, 6),), in the plan ((6, 2),)",
    ):  # fmt: skip
        assert words in str(error.value)


def test_a_file_that_was_edited_is_refused(study, tmp_path):
    file = tmp_path / "bits.json"
    quantize.plan(study, size="20%").save(file)
    fields = json.loads(file.read_text())
    fields["layers"][0]["path"] = "another"
    file.write_text(json.dumps(fields))
    with pytest.raises(RecordError, match="fingerprint: expected"):
        quantize.Plan.load(file)
    study.save(file)
    with pytest.raises(RecordError, match="kind: expected a plan of quantize.plan, got 'Study'"):
        quantize.Plan.load(file)


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "size, bops and latency are None"),
        ({"size": "3%"}, "size is at most 9 B, and the smallest possible is 20 B"),
        ({"size": 0.15}, "size is a number of bytes.*or a share.*got 0.15"),
        ({"size": "twelve"}, "size is a number of bytes.*or a share.*got 'twelve'"),
        (
            {"bops": "0.1%"},
            "bops is at most 79.87 bit operations, and the smallest possible is 312",
        ),
        ({"latency": 1e-6, "table": TIMES}, "smallest possible is 3e-06 s"),
        ({"latency": 1e-6}, "latency is given together with table"),
        ({"latency": 1.0, "table": {FIRST: {2: 1.0}}}, r"table\['net/first'\]\[4\] is a number of"),
        ({"size": "20%", "bits": (3,)}, r"bits\[0\] is a width of the study, one of 2, 4, 8, 32"),
        ({"size": "20%", "pinned": {"x": 8}}, "a path in pinned is that of a layer of the study"),
        ({"size": "20%", "ties": "adds"}, "ties is 'sums' or lists of paths"),
        ({"size": "20%", "ties": [["x"]]}, r"ties\[0\]\[0\] is the path of a layer"),
        ({"size": "20%", "ties": [[FIRST, LAST]], "first": 8, "last": 4}, "no width in common"),
    ],
)
def test_what_is_refused(study, options, words):
    with pytest.raises(ValueError, match=words):
        quantize.plan(study, **options)


def test_limits_that_cannot_be_kept_together(study):
    with pytest.raises(quantize.InfeasibleError) as error:
        quantize.plan(study, size=78 * 2 / 8, latency=3e-6, table=TIMES)  # 2 bits are slowest
    assert error.value.smallest["latency"] == pytest.approx(9e-6)
    assert error.value.smallest["size"] == 78 * 4 / 8
