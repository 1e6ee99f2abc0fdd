"""Plans: the search, memory, prices against simulation, files, words, and bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time

import pytest

import tfscale
from tfscale import plan
from tfscale.collectives import Link
from tfscale.plan import pipelines
from tfscale.plan.cluster import Cluster, Host, Racks
from tfscale.plan.cut import Cut
from tfscale.plan.formulas import grids
from tfscale.plan.price import Pricer, balanced
from tfscale.plan.search import MemoryLimitError, search
from tfscale.plan.spreads import Row, cheapest, spreads_of
from tfscale.plan.units import Unit, transformer
from tfscale.support.records import RecordError

GPT = transformer(blocks=32, hidden=2048, heads=16, sequence=1024, vocabulary=50000)
BOXES = "8 x (8 devices, 40GB, 100TFLOPS, 300GB/s), 800gbit"
SMALL = transformer(blocks=4, hidden=256, heads=4, sequence=64, vocabulary=1000)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cluster", [BOXES, "16 x (4 devices, 80GB, 100TFLOPS, 300GB/s), 400gbit"])
def test_a_transformer_of_32_blocks_on_64_devices(cluster: str) -> None:
    begin = time.process_time()
    found = plan.best(GPT, 512, cluster).found
    assert time.process_time() - begin < 5
    assert found.gap < 0.01
    assert [price.seconds for price in found.prices] == sorted(p.seconds for p in found.prices)


def orders_of(stages: int, microbatches: int, units: int) -> list[str]:
    """The orders that a pipeline of these sizes can work in."""
    if stages == 1 or microbatches == 1:
        return ["1f1b"]
    fits = microbatches % stages == 0 and 2 * stages <= units
    return ["1f1b", "zero bubble", *["interleaved"] * fits]


def every_price(units, batch: int, cluster: Cluster):
    """All cuts of a cluster, priced without a bound."""
    pricer = Pricer(units, batch, cluster)
    for rows, columns, stages in itertools.product([1, 2, 4, 8], repeat=3):
        if rows * columns * stages == cluster.devices and stages <= len(units):
            for microbatches in (1, 2, 4, 8, 16, 32):
                if batch % (columns * microbatches) == 0 and microbatches <= 16 * stages:
                    for order in orders_of(stages, microbatches, len(units)):
                        price = pricer.price(Cut(rows, columns, stages, microbatches, order))
                        if price is not None:
                            yield price, pricer.bound(price.cut)


@pytest.mark.parametrize("link", ["1gbit", "25gbit", "400gbit"])
def test_the_search_misses_nothing_and_bounds_hold(link: str) -> None:
    cluster = Cluster.parse(f"4 x (2 devices, 16GB, 10TFLOPS), {link}")
    found = search(SMALL, 32, cluster)
    prices = list(every_price(SMALL, 32, cluster))
    assert all(bound <= price.seconds * (1 + 1e-9) for price, bound in prices)
    least = min(price.seconds for price, _ in prices)
    assert found.prices[0].seconds == pytest.approx(least)
    assert found.bound <= least


def in_two_chunks(stages: int, microbatches: int) -> pipelines.PipelineOrder:
    return pipelines.interleaved(stages, microbatches, 2)


def test_prices_of_equal_stages_are_those_of_the_simulation() -> None:
    units = [Unit(f"block_{n}", "other", flops=1e9, outputs=0) for n in range(8)]
    cluster = Cluster([Host(8, rate=1e12, link=Link(0, 0), launch=0)], Link(0, 0))
    pricer = Pricer(units, 64, cluster)
    for stages, microbatches in ((2, 4), (4, 8), (8, 64)):
        for order in (pipelines.one_f_one_b, pipelines.zero_bubble, in_two_chunks):
            made = order(stages, microbatches)
            if made.stages > len(units):
                continue
            cut = Cut(stages=stages, columns=1, microbatches=microbatches, order=made.name)
            times = pipelines.Times(*[64 / microbatches * 8e9 / made.stages / 1e12] * 3)
            price = pricer.price(cut)
            assert price.seconds == pytest.approx(pipelines.simulate(made, times).seconds)


def test_prices_of_uneven_stages_are_near_the_simulation() -> None:
    flops = [3e9, 1e9, 1e9, 2e9, 2e9, 1e9, 1e9, 1e9]
    units = [Unit(f"block_{n}", "other", flops=one, outputs=0) for n, one in enumerate(flops)]
    cluster = Cluster([Host(4, rate=1e12, link=Link(0, 0), launch=0)], Link(0, 0))
    price = Pricer(units, 64, cluster).price(Cut(stages=4, microbatches=16))
    stages = [sum(flops[a:b]) / 1e9 for a, b in itertools.pairwise((0, *price.ends))]
    assert max(stages) == 4  # 12 on four stages, the first of which cannot be split
    one = 4 * 1e9 / 1e12
    times = pipelines.Times(one, one, one, shares=stages)
    seen = pipelines.simulate(pipelines.one_f_one_b(4, 16), times).seconds
    assert seen == pytest.approx(price.seconds, rel=0.02)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_are_balanced(stages: int) -> None:
    times = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    ends = balanced(times, stages)
    best = min(
        max(sum(times[a:b]) for a, b in itertools.pairwise((0, *inner, 6)))
        for inner in itertools.combinations(range(1, 6), stages - 1)
    )
    assert max(sum(times[a:b]) for a, b in itertools.pairwise((0, *ends))) == best


# ------------------------------------------------------ spreads


def row_of(ranks: int, samples: float, link: Link) -> Row:
    gather = lambda nbytes: grids.gather_seconds(ranks, nbytes, link)  # noqa: E731
    return Row(ranks, samples, 1e12, gather, link.seconds)


def seconds_of(units, row: Row, spreads) -> float:
    total, before = 0.0, spreads[0].takes
    for unit, spread in zip(units, spreads):
        load = row.load(unit, spread)
        total += load.forward + load.backward + sum(row.change(before, spread.takes, unit.inputs))
        before = spread.gives
    return total


def test_spreads_are_the_best_of_all_combinations() -> None:
    units = [
        Unit("conv", "conv", 1e5, 4e4, 1e5, 5e7, halo=(1e3, 2e3)),
        Unit("relu", "plain", 0, 1e5, 1e5, 1e5),
        Unit("wide", "dense", 1e7, 1e5, 4e4, 2e7),
        Unit("narrow", "dense", 1e7, 4e4, 1e4, 2e7),
        Unit("attention", "pair", 1e6, 1e4, 1e4, 1e7),
    ]
    for ranks, samples, beta in itertools.product((2, 4), (1, 8), (1e-12, 1e-10, 1e-8)):
        row = row_of(ranks, samples, Link(1e-6, beta))
        found = cheapest(units, row, lambda load: load.forward + load.backward, 1)
        options = itertools.product(*(spreads_of(unit, row) for unit in units))
        best = min(seconds_of(units, row, path) for path in options)
        assert seconds_of(units, row, found) == pytest.approx(best)


def test_columns_and_a_gather_are_the_papers_one_and_a_half_dimensions() -> None:
    """Check a layer on 8 x 8 against the formula of SPAA 2018, weights' sums left out."""
    link = Link(2e-6, 1 / 6e9)
    layers = [grids.Layer("c5", 0, 43264), grids.Layer("f6", 37748736, 4096)]
    row = row_of(8, 2048 / 8, link)
    unit = Unit("f6", "dense", 37748736, 4 * 43264, 4 * 4096)
    columns = next(spread for spread in spreads_of(unit, row) if spread.name == "columns")
    load = row.load(unit, columns)
    ours = load.backward + sum(row.change("split", "whole", unit.outputs))
    whole = grids.layer_seconds(*layers, grids.Grid(8, 8), 2048, link)
    sums = 2 * grids.gather_seconds(8, 4 * 37748736 / 8, link)
    assert ours == pytest.approx(whole - sums)
    assert load.own == 37748736 / 8 and load.common == 0


def test_experts_travel_by_all_to_all() -> None:
    """Check that (P - 1) / P of a rank's tokens leave it, to the experts and back, in each pass."""
    link = Link(1e-6, 1e-9)
    unit = Unit("experts", "experts", 8e6, 1e6, 1e6, 1e9, routed=2e6)
    row = row_of(4, 8, link)
    experts = next(one for one in spreads_of(unit, row) if one.splits)
    load = row.load(unit, experts)
    one = 2 * 1e-6 + 1e-9 * (8 * 2e6 / 4) * 3 / 4
    compute = 3 * 1e9 * 8 / 4 / 1e12
    assert load.forward + load.backward == pytest.approx(compute + 4 * one)
    assert (load.own, load.common) == (2e6, 0)


def test_sequence_parallelism_divides_what_is_kept() -> None:
    unit = Unit("block", "pair", 1e6, 1e6, 1e6, 1e9, kept=20e6)
    row = row_of(4, 2, Link(0, 0))
    heads, sequence = (one for one in spreads_of(unit, row) if one.splits)
    assert row.load(unit, sequence).kept == 2 * 20e6 / 4
    assert row.load(unit, heads).kept == 2 * (19e6 / 4 + 1e6)  # whole inputs on each rank


# ------------------------------------------------------ memory


def test_a_limit_of_memory_makes_shards_and_then_recomputation() -> None:
    sizes, shards = [], []
    for gigabytes in (80, 20, 9):
        text = f"16 x (4 devices, {gigabytes}GB, 100TFLOPS, 300GB/s), 400gbit"
        found = search(GPT, 512, Cluster.parse(text), runnable=True, staged=False)
        price = found.prices[0]
        assert price.bytes <= gigabytes * 1e9
        sizes.append(price.bytes)
        shards.append((price.cut.shard, price.cut.microbatches > 1))
    assert sizes == sorted(sizes, reverse=True)
    assert shards[0][0] == "none" and shards[2][0] != "none"


def test_a_cluster_that_is_too_small_says_what_fits() -> None:
    with pytest.raises(MemoryLimitError, match="the smallest cut .* needs .* GB on each of 2") as e:
        plan.best(GPT, 64, "2 x (1 device, 4GB), 10gbit")
    needed = float(re.search(r"Take devices with ([\d.]+) GB", str(e.value))[1])
    fits = plan.best(GPT, 64, f"2 x (1 device, {needed + 0.01:.2f}GB), 10gbit")
    assert fits.price.bytes <= (needed + 0.01) * 1e9


def test_memory_is_that_of_zero() -> None:
    units = [Unit("dense", "other", parameters=1e6)]
    cluster = Cluster.parse("4 x (1 device), 10gbit")
    for shard, expected in (("none", 16), ("state", 10), ("gradients", 7), ("all", 4 + 4)):
        price = Pricer(units, 8, cluster).price(Cut(columns=4, shard=shard))
        assert price.bytes == expected * 1e6  # "all" gathers the weights of its largest unit


# ------------------------------------------------------ plans


ONE = [Unit("dense", "dense", parameters=1e6, flops=1e9)]


def plan_of(cut: Cut, units=SMALL, cluster: str = "(4 devices), 10gbit", **more) -> plan.Plan:
    """The plan whose best cut is ``cut``."""
    found = plan.best(units, 64, cluster, **more)
    price = Pricer(units, 64, found.cluster).price(cut)
    return dataclasses.replace(found, found=dataclasses.replace(found.found, prices=(price,)))


def test_a_plan_says_what_runs_it() -> None:
    runs = plan.best(ONE, 64, "4 x (1 device, 10TFLOPS), 10gbit", runnable=True)
    assert runs.cut.columns == 4 and not runs.cannot_run()
    assert runs.strategy_arguments()["wire"] == "fp32"
    assert runs.strategy_arguments()["algorithm"] in ("ring", "tree", "halving", "direct")
    lossy = plan.best(ONE, 64, "4 x (1 device), 1gbit", runnable=True, wires=["fp32", "int8"])
    assert lossy.strategy_arguments()["wire"] == "int8"


@pytest.mark.parametrize(
    ("cut", "given"),
    [
        (Cut(columns=4, shard="state"), {"shard": "optimizer"}),
        (Cut(columns=4, shard="all"), {"shard": "all"}),
        (Cut(columns=2, stages=2, microbatches=8, shard="gradients"), {"shard": "optimizer"}),
        (
            Cut(stages=4, microbatches=8),
            {
                "grid": {"stages": 4},
                "pipeline": {
                    "cuts": ["attention_1", "attention_2", "attention_3"],
                    "microbatches": 8,
                    "order": "1f1b",
                },
            },
        ),
    ],
)
def test_a_plan_becomes_arguments(cut: Cut, given: dict) -> None:
    found = plan_of(cut)
    assert {name: found.strategy_arguments()[name] for name in given} == given
    assert not found.cannot_run()


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (Cut(rows=4), r"rows of 4 ranks that share layers \(rows"),  # units without paths
        (
            Cut(stages=2, columns=2, microbatches=8, shard="all"),
            "ZeRO-3 beside rows of 1 ranks and 2 stages",
        ),
        (Cut(columns=4, recompute=True), "use tfscale.callbacks.Recompute"),
        (Cut(columns=4, microbatches=2), "gradient_accumulation_steps"),
        (Cut(columns=4, every=50), r"tfscale.sync.DiLoCo\(50\)"),
    ],
)
def test_a_plan_says_what_cannot_be_run(cut: Cut, words: str) -> None:
    wide = [Unit("wide", "dense", 1e8, 4e3, 4e3, 2e8)]
    (said,) = plan_of(cut, wide if cut.rows > 1 else SMALL).cannot_run()
    assert re.search(words, said)


def test_rules_of_tensor_parallelism_come_from_the_units() -> None:
    up = Unit("up", "dense", 1e7, 4e4, 4e4, 2e7, cuts=(("^up/", "either"),))
    down = Unit("down", "dense", 1e7, 4e4, 4e4, 2e7, cuts=(("^down/", "either"),))
    found = plan.best([up, down], 1, "(2 devices, 1GFLOPS), 10gbit", runnable=True)
    assert found.cut == Cut(rows=2)
    assert found.strategy_arguments()["tensor"] == {"^up/": "columns", "^down/": "rows"}
    assert found.strategy_arguments()["grid"] == {"tensor": 2} and not found.cannot_run()


def test_unequal_devices_get_shares() -> None:
    given = plan.best(ONE, 64, "(1 device, 3TFLOPS) + (1 device, 1TFLOPS), 100gbit")
    assert given.strategy_arguments()["shares"] == [3, 1]


def test_a_plan_explains_itself() -> None:
    found = plan.best(ONE, 64, "8 x (1 device, 10TFLOPS), 1gbit", runnable=True)
    words = found.explain()
    assert "bound by the sums of gradients" in words
    assert "Gap: no cut in the search is more than" in words
    gains = found.next_buys()
    assert max(gains, key=gains.get) in (
        "a link between hosts of half the time", "a batch of twice the size"
    )  # fmt: skip
    assert gains["twice the memory"] == pytest.approx(1)
    assert found.table().splitlines()[1].startswith("data 8")


def test_a_file_holds_the_whole_plan(tmp_path) -> None:
    found = plan.best(SMALL, 64, "4 x (2 devices, 16GB, 10TFLOPS), 25gbit")
    found.save(tmp_path / "plan.json")
    assert plan.Plan.load(tmp_path / "plan.json") == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.update(cuts=[]), "cuts: expected one cut or more"),
        (
            lambda fields: fields["cuts"][0].update(rows=0),
            r"cuts\[0\].rows: expected a number of 1",
        ),
        (lambda fields: fields["cuts"][0].update(shard="half"), "shard is .*got 'half'"),
        (lambda fields: fields["units"][0].update(kind="soft"), "kind is .*got 'soft'"),
        (lambda fields: fields["units"][0].update(flops="many"), "flops: expected a number"),
        (lambda fields: fields.update(colour="red"), "colour: expected no such key"),
        (lambda fields: fields["cluster"].update(hosts=[]), "hosts: expected one host or more"),
    ],
)
def test_nonsense_in_a_file_is_named(change, words: str, tmp_path) -> None:
    plan.best(SMALL, 64, "2 x (1 device), 25gbit").save(tmp_path / "plan.json")
    fields = json.loads((tmp_path / "plan.json").read_text())
    change(fields)
    (tmp_path / "plan.json").write_text(json.dumps(fields))
    with pytest.raises((RecordError, ValueError), match=words):
        plan.Plan.load(tmp_path / "plan.json")


def test_unequal_devices_share_samples_by_their_rates() -> None:
    units = [Unit("dense", "dense", flops=1e9)]
    fast, slow = Host(rate=3e12, launch=0), Host(rate=1e12, launch=0)
    free = Link(0, 0)
    price = Pricer(units, 400, Cluster([fast, slow], free)).price(Cut(columns=2))
    assert price.seconds == pytest.approx(300 * 3e9 / 3e12)  # 300 samples on one, 100 on the other


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_are_in_proportion_to_their_devices(stages: int) -> None:
    times = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    speeds = [1.0, 3.0, 2.0, 1.0][:stages]
    ends = balanced(times, stages, speeds)

    def slowest_of(inner) -> float:
        parts = itertools.pairwise((0, *inner, 6))
        return max(sum(times[a:b]) / speed for (a, b), speed in zip(parts, speeds))

    best = min(map(slowest_of, itertools.combinations(range(1, 6), stages - 1)))
    assert slowest_of(ends[:-1]) == best


@pytest.mark.parametrize("runnable", [False, True])
def test_a_pipeline_on_unequal_devices(runnable: bool) -> None:
    """Check that the fast host gets three units of four, and that bounds hold."""
    units = [Unit(f"block_{n}", "other", flops=1e9) for n in range(8)]
    hosts = [Host(1, rate=3e12, launch=0), Host(1, rate=1e12, launch=0)]
    pricer = Pricer(units, 64, Cluster(hosts, Link(0, 0)), runnable=runnable)
    price = pricer.price(Cut(stages=2, microbatches=16))
    assert price.ends == (6, 8)
    each = 64 / 16 * 6 * 3e9 / 3e12
    assert price.seconds == pytest.approx((16 + 1) * each)
    assert pricer.bound(price.cut) <= price.seconds


def test_stages_stand_where_the_strategy_puts_them() -> None:
    """Check that runnable plans send gradients between hosts, and others send activations."""
    units = [Unit(f"block_{n}", "other", 1e7, 1e4, 1e4, 1e6) for n in range(4)]
    cluster = Cluster.parse("2 x (2 devices), 1gbit")
    cut = Cut(columns=2, stages=2, microbatches=4)
    near, far = (
        Pricer(units, 64, cluster, runnable=runnable).price(cut) for runnable in (False, True)
    )
    assert far.parts["sums"] > 10 * near.parts["sums"]
    grid = tfscale.Grid(data=2, stages=2)
    teams = [[r for r in range(4) if grid.stage(r) == stage] for stage in range(2)]
    assert teams == [[0, 2], [1, 3]]


def test_pictures_of_plans(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    found = plan.best(SMALL, 64, "4 x (2 devices, 16GB, 10TFLOPS), 25gbit")
    times, sizes = found.draw().axes
    assert times.get_yticklabels()[0].get_text() == str(found.cut)
    assert len(sizes.patches) == 5 * len(found.found.prices)


def test_planning_needs_no_tensorflow() -> None:
    code = (
        "import sys; sys.modules['tensorflow'] = None; from tfscale import plan; "
        "print(plan.best(plan.transformer(2, 64, 2, 16, 100), 8, '2 x (1 device), 1gbit').cut)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


# ------------------------------------------------------ what changes results, or waits


def test_rounds_sum_between_hosts_less_often() -> None:
    cluster = Cluster.parse("4 x (2 devices), 1gbit")
    units = [Unit("own", "other", parameters=1e7, flops=1e6)]
    pricer = Pricer(units, 64, cluster)
    each, rounds = (pricer.price(Cut(columns=8, every=every)) for every in (1, 100))
    assert pricer.near(Cut(columns=8)) == 2
    inner, _ = pricer._sum(2, 1, 1e7, "fp32")
    outer, _ = pricer._sum(4, 2, 1e7, "fp32")
    assert rounds.parts["sums"] == pytest.approx(inner + outer / 100)
    assert rounds.parts["sums"] < each.parts["sums"] / 10
    assert rounds.memory["state"] == each.memory["state"] + 2 * 4 * 1e7
    told = plan.best(units, 64, cluster, diloco=100)
    assert told.cut.every == 100 and "DiLoCo 100" in told.table()
    assert all(price.cut.every == 1 for price in plan.best(units, 64, cluster).found.prices)


def test_rounds_are_between_racks_if_there_are_any() -> None:
    cluster = Cluster.parse("8 x (2 devices), 25gbit, racks of 4, 1gbit")
    assert Pricer(ONE, 64, cluster).near(Cut(columns=16)) == 8


def test_offload_is_zero_infinitys_efficiency() -> None:
    """Check the price against the formula of the paper, with what an update moves."""
    from tfscale.plan.formulas.state import offload_efficiency

    units = [Unit("dense", "dense", parameters=1e9, flops=1e12)]
    host = Host(1, 10e9, 50e12, bus=12e9, launch=0)
    pricer = Pricer(units, 8, Cluster([host]))
    cut = Cut(offload=True)
    compute = 8 * 3e12 / 50e12
    moved = 1e9 * (4 + 4)
    efficiency = offload_efficiency(8 * 3e12 / moved, 12e9, 50e12)
    assert pricer.price(cut).seconds == pytest.approx(compute / efficiency)
    assert pricer.price(cut).memory["state"] == 0
    found = plan.best(units, 8, Cluster([host]))  # 16 bytes a parameter do not fit into 10 GB
    assert found.cut.offload and "offload" in found.table()
    assert found.cannot_run() == ["optimizer state in the memory of the hosts"]
    with pytest.raises(MemoryLimitError):
        plan.best(units, 8, Cluster([dataclasses.replace(host, bus=0.0)]))


# ------------------------------------------------------ scaling


def test_a_curve_names_what_binds() -> None:
    units = [Unit("dense", "dense", parameters=1e6, flops=1e9)]
    cluster = Cluster.parse("(1 device, 1TFLOPS), 10gbit, 2ms")
    points = {p.ranks: p for p in plan.curve(units, 4096, cluster, [1, 8, 512, 4096, 8192])}
    limits = [p.limit for p in points.values()]
    assert limits == ["compute", "compute", "latency", "latency", "batch"]
    assert points[1].speed_up == 1 and points[8].efficiency > 0.9
    assert points[8192].seconds == points[4096].seconds  # P = B is the limit
    slow = Cluster.parse("(1 device, 1TFLOPS), 100Mbit, 1us")
    (point,) = plan.curve(units, 64, slow, [16])
    assert point.limit == "bandwidth"
    weak = plan.curve(units, 4096, cluster, [1, 8, 512], kind="weak")
    assert [p.batch for p in weak] == [4096, 8 * 4096, 512 * 4096]
    assert weak[-1].efficiency > 0.99


# ------------------------------------------------------ clusters


def test_a_cluster_is_read_from_its_text_and_its_file(tmp_path) -> None:
    cluster = Cluster.parse(
        "2 x (4 devices, 16GB, 90TFLOPS, 100GB/s, 3us) + (8 devices), 25gbit, 9us"
    )
    host = Host(4, 16e9, 90e12, Link(3e-6, 1e-11))
    assert cluster == Cluster([host, host, Host(8)], Link(9e-6, 8 / 25e9))
    assert (cluster.devices, cluster.width) == (16, 4)
    cluster.dump(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    assert Cluster.parse(str(cluster)).hosts[0].rate == 90e12
    assert [h.devices for h in cluster.first(5).hosts] == [4, 1]
    assert cluster.first(100).devices == 100


def test_racks_are_a_third_level(tmp_path) -> None:
    text = "8 x (4 devices, 16 GB, 10 TFLOPS, 10 GB/s), 25 gbit, racks of 4, 10 gbit"
    cluster = Cluster.parse(text)
    assert str(cluster) == text
    assert cluster.racks == Racks(4, Link(5e-5, 8 / 10e9))
    cluster.dump(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    assert cluster.machines(4, 1) == [cluster.inner]
    (within,) = cluster.machines(16, 1)  # one rack
    assert within.sizes == (4,) * 4 and within.outer.beta == 4 * 8 / 25e9
    by_host, by_rack = cluster.machines(32, 1)
    assert by_host.sizes == (4,) * 8 and by_rack.sizes == (16, 16)
    assert by_host.outer == by_rack.outer == Link(5e-5, 16 * 8 / 10e9)
    assert by_rack.inner == within.outer
    # A hierarchy by racks sends a sixteenth over the uplinks; one by hosts sends a quarter.
    units = [Unit("dense", "dense", parameters=1e8, flops=1e6)]
    flat = dataclasses.replace(cluster, racks=None)
    for_racks, for_flat = (
        Pricer(units, 64, one).price(Cut(columns=32)).parts["sums"] for one in (cluster, flat)
    )
    by_hosts = 2 * 7 / 8 * 4e8 / 4 * by_host.outer.beta
    assert for_flat < for_racks < 0.6 * by_hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4 x (1 device), 1gbit, racks of 0, 1gbit", "racks"),
        ("4 x (1 device), 1gbit, racks of 2, 16GB", "Memory stands inside the brackets"),
        ("", "cluster is a text such as"),
        ("64 hosts", "cluster is a text such as .* got '64 hosts'"),
        ("(4 devices), 25gbut", "'25gbut' is not understood"),
        ("(4 devices, 4 devices)", "two of devices"),
        ("(4 devices, 16GB), 1gbit, 16GB", "Memory stands inside the brackets"),
        ("0 x (1 device)", "hosts, 1 or more"),
        ("(4 devices, 0gbit)", "'0gbit' is not understood"),
    ],
)
def test_a_text_that_is_no_cluster(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cluster.parse(text)
