"""Links: equations, real measurements, and their cache."""

import json
import logging
import math
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from helpers import group

from tests import warm
from tfscale.collectives import Cluster, Link
from tfscale.exchange import link
from tfscale.native import build, library
from tfscale.ops import Group

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "link.py"
CLUSTER_OF_5 = json.dumps(
    {
        "groups": [2, 3],
        "inner": {"alpha": 0, "beta": 0},
        "outer": {"alpha": 0, "beta": 0},
        "gamma": 0,
    }
)
ALPHA, BETA, GAMMA = 3e-4, 2e-9, 5e-10


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, of which the native library needs nothing any more."""
    library.load()
    monkeypatch.setenv("TFSCALE_CACHE", str(tmp_path))
    link._warn_once.cache_clear()
    return tmp_path / "links"


def numbers(measured):
    return measured.machine, measured.gamma


class TestEquations:
    @pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
    @pytest.mark.parametrize("truth", [(ALPHA, BETA, GAMMA), (ALPHA, BETA, 0.0), (0.0, BETA, 0.0)])
    def test_times_made_by_formula_give_the_numbers_back(self, ranks, truth):
        alpha, beta, gamma = truth
        experiments = link._experiments([group(ranks)], 0, "fp32")
        rows = [experiment.row(1) for experiment in experiments]
        times = [e.cost.time(e.nbytes, Link(alpha, beta), gamma) for e in experiments]
        np.testing.assert_allclose(rows @ np.array(truth), times, rtol=1e-12)
        np.testing.assert_allclose(link._least_squares(rows, times), truth, rtol=1e-6, atol=1e-15)

    def test_two_links_are_told_apart(self):
        inner, outer = Link(1e-5, 1e-10), Link(1e-3, 1e-9)
        experiments = [
            *link._experiments([group(4)], 0, "int8"),
            *link._experiments([group(3)], 1, "int8"),
        ]
        times = [e.cost.time(e.nbytes, (inner, outer)[e.link], GAMMA) for e in experiments]
        found = link._least_squares([e.row(2) for e in experiments], times)
        truth = [inner.alpha, inner.beta, outer.alpha, outer.beta, GAMMA]
        np.testing.assert_allclose(found, truth, rtol=1e-6)

    def test_no_number_is_below_zero(self):
        """The best unbounded answer would be (2, -1)."""
        assert link._least_squares([[1, 1], [1, 0]], [1, 2]) == pytest.approx([1.2, 0])


def assert_possible(found):
    """Allow zeros: on a busy machine one number may explain what another one explains as well."""
    assert all(math.isfinite(number) and number >= 0 for number in found), found
    assert any(number > 0 for number in found), found


class TestMeasure:
    @pytest.mark.parametrize("wire", ["fp32", "int4"])
    def test_devices_of_one_process(self, wire):
        measured = link.measure(group(4), 0.2, wire)
        assert isinstance(measured.machine, Link)
        assert_possible([measured.machine.alpha, measured.machine.beta, measured.gamma])

    def test_one_device_has_no_link(self):
        assert numbers(link.measure(group(1))) == (Link(0.0, 0.0), 0.0)


class TestCache:
    def test_the_second_time_it_is_read(self, cache):
        first = link.cached(group(2), 0.1)
        (file,) = cache.iterdir()
        second = link.cached(group(2), 0.1)
        assert (first.source, second.source) == ("measured at start", str(file))
        assert numbers(second) == numbers(first)

    def test_other_devices_and_wires_are_measured_anew(self, cache):
        for ranks, wire in ((2, "fp32"), (3, "fp32"), (2, "int8")):
            assert link.cached(group(ranks), 0.1, wire).source == "measured at start"
        assert len(list(cache.iterdir())) == 3

    def test_another_transport_is_another_link(self, cache):
        for transport in ("sockets", "grpc"):
            made = Group.local(["CPU:0", "CPU:1"], transport=transport)
            assert link.cached(made, 0.1).source == "measured at start"
            assert link.cached(made, 0.1).source != "measured at start"

    def test_ports_do_not_count_and_hosts_do(self):
        def key(*peers):
            made = Group.local(["CPU:0", "CPU:1"])
            made.peers = peers
            return link._key(made, "fp32")

        one = key("worker 0 at 10.0.0.1:222", "worker 1 at 10.0.0.2:222, CPU:0")
        assert one == key("worker 0 at 10.0.0.1:333", "worker 1 at 10.0.0.2:444, CPU:0")
        assert one != key("worker 0 at 10.0.0.1:222", "worker 1 at 10.0.0.3:222, CPU:0")

    @pytest.mark.one_in(3)
    @pytest.mark.parametrize(
        ("edit", "why"),
        [
            (lambda text: text[:20], "this is not JSON"),
            (lambda text: text.replace("alpha", "alhpa"), "alhpa: expected no such key"),
            (lambda text: text.replace("gamma", "gama"), "gamma: expected a number"),
            (lambda text: "[" * 100_000, "of a few levels"),
            (lambda text: text.replace("{", "\0"), "zero bytes"),
            (lambda text: CLUSTER_OF_5, "groups: expected sizes that add up to 2 ranks"),
        ],
    )
    def test_a_broken_entry_is_replaced_and_told_once(self, cache, caplog, edit, why):
        link.cached(group(2), 0.1)
        (file,) = cache.iterdir()
        good, broken = file.read_text(), edit(file.read_text())
        with caplog.at_level(logging.WARNING, "tfscale"):
            for _ in range(2):
                file.write_text(broken)
                assert link.cached(group(2), 0.1).source == "measured at start"
                assert json.loads(file.read_text()).keys() == json.loads(good).keys()
        (record,) = [r for r in caplog.records if r.name == "tfscale"]
        assert why in record.message and str(file) in record.message

    def test_it_is_private_whatever_the_umask(self, cache):
        before = os.umask(0)
        try:
            link.cached(group(2), 0.1)
        finally:
            os.umask(before)
        (file,) = cache.iterdir()
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600

    @pytest.mark.parametrize("what", ["file", "links", "cache"])
    def test_what_others_may_have_written_is_measured_again(self, cache, caplog, what):
        link.cached(group(2), 0.1)
        (file,) = cache.iterdir()
        open_to_others = {"file": file, "links": cache, "cache": cache.parent}[what]
        open_to_others.chmod(0o777)
        with caplog.at_level(logging.WARNING, "tfscale"):
            assert link.cached(group(2), 0.1).source == "measured at start"
        assert f"{open_to_others} may be written by others" in caplog.text
        again = link.cached(group(2), 0.1).source
        assert (again == "measured at start") == (what == "cache")  # which is not ours to close

    def test_a_link_in_the_place_of_the_folder_is_not_followed(self, cache, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        cache.symlink_to(elsewhere)
        assert link.cached(group(2), 0.1).source == "measured at start"
        assert not list(elsewhere.iterdir())

    def test_where_nothing_can_be_written_it_measures(self, cache, caplog):
        cache.write_text("a file where the folder should be")
        with caplog.at_level(logging.WARNING, "tfscale"):
            for _ in range(2):
                assert link.cached(group(2), 0.1).source == "measured at start"
        told = [r.message for r in caplog.records if r.name == "tfscale"]
        assert told and len(told) == len(set(told)) and str(cache) in told[0]


def of_worker(output):
    return [json.loads(line) for line in re.findall(r"^LINK (.*)$", output, re.MULTILINE)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), 2])
def test_two_processes_measure_the_same_bits_and_agree_on_the_cache(tmp_path, devices):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TFSCALE_LIBRARY": str(build.find_or_build()),
        "DEVICES": str(devices),
        "MEETING": str(tmp_path),
    }
    caches = [{"TFSCALE_CACHE": str(tmp_path / name)} for name in "ab"]
    with warm.Workers([str(WORKER)], 2, environment=environment, environments=caches) as workers:
        one, other = (of_worker(output) for output in workers.wait(300))
    print("MEASURED", one)
    measured, again, *_ = one  # then one entry is lost, then one differs
    assert [entry["numbers"] for entry in one] == [entry["numbers"] for entry in other]
    assert [entry["cached"] for entry in one] == [False, True, False, False]
    assert [entry["cached"] for entry in other] == [False, True, False, False]
    assert again["numbers"] == measured["numbers"]
    kind = Cluster if devices == 2 else Link
    assert measured["kind"] == kind.__name__
    assert_possible([float.fromhex(number) for number in measured["numbers"]])
