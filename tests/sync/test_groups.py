"""Groups of replicas on four devices of one process, and on two processes of two devices."""

from pathlib import Path

import keras
import pytest

from tests.strategy.groups import SECONDS
from tests.sync.checks import fit, regression, sample
from tests.sync.groups import CHECKS, STREAMS
from tfscale import ScaleStrategy, compression, sync
from tfscale.collectives import ring

pytestmark = pytest.mark.timeout(SECONDS + 60)
WORKER = Path(__file__).parent / "workers" / "groups.py"


DEVICES = [f"CPU:{number}" for number in range(4)]


def make(sync, replicas=4, **settings):
    return ScaleStrategy("ring", devices=DEVICES[:replicas], sync=sync, **settings)


# Only in full runs.
SELDOM = {"fragments", *STREAMS}  # by two devices, `make test` does what streams do
SELDOM |= {
    "as_one_larger_replica with one row",
    "as_one_larger_replica with three rows",
    "as_one_larger_replica accumulating with one row",
}
SELDOM |= {"programs eager", "sent_otherwise behind steps"}
SELDOM |= {"silence of local SGD", "silence of a centre"}
SELDOM |= {f"sent_otherwise by {way}" for way in ("int4", "bf16", "TopK")}


@pytest.mark.one_in(15)
@pytest.mark.parametrize("case", sample(CHECKS, SELDOM))
def test_four_devices(case, tmp_path):
    keras.utils.set_random_seed(1)
    CHECKS[case](make, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("case", CHECKS)
@pytest.mark.parametrize("layout", ["2x2"])
def test_two_processes_of_two_devices(passes, layout, case):
    passes(layout, case)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"inner": sync.LocalSGD(2)}, "inner is tfscale.sync.EveryStep"),
        ({"outer": sync.EveryStep()}, "outer is a rule that says when groups agree"),
        ({"outer": sync.Hierarchical()}, "outer is a rule that says when groups agree"),
        ({"outer": sync.Gossip()}, "use a rule that computes means"),
        ({"outer": sync.LocalSGD(8, start=3)}, "Leave out start"),
        ({"group": 0}, "group is a number of replicas, 1 or more; got 0"),
        ({"group": 3}, "groups of 3 replicas, and there are 4: 4 on each of 1 workers"),
        ({"outer": sync.ElasticAveraging(8, alpha=0.7), "group": 2}, "alpha times 3 must be less"),
    ],
)
def test_what_is_wrong_is_refused_at_once(wrong, said):
    with pytest.raises(ValueError, match=said):
        make(sync.Hierarchical(**wrong))


def test_methods_that_groups_would_follow_otherwise_are_refused():
    with pytest.raises(ValueError, match="group could choose a different one"):
        make(sync.Hierarchical(group=2), method=compression.Adaptive())
    outer = sync.DiLoCo(8, method=compression.RandomK(0.5))
    with pytest.raises(ValueError, match="draw random numbers from the same seed"):
        make(sync.Hierarchical(outer=outer, group=2), method=compression.RandomK(0.5))


def test_a_schedule_is_for_one_number_of_ranks_and_there_are_two():
    rule = sync.Hierarchical(group=2)
    for ranks in (2, 4):
        said = f"ring is for {ranks} ranks, but .* for the 2 ranks of a group, and for all 4 ranks"
        with pytest.raises(ValueError, match=said):
            ScaleStrategy(ring(ranks), devices=DEVICES, sync=rule)
    assert ScaleStrategy(ring, devices=DEVICES, sync=rule).rounds.teams.team.size == 2


@pytest.mark.parametrize(
    "rule, devices, hosts, size",
    [
        (sync.EveryStep(), 2, "ab", 4),
        (sync.LocalSGD(8), 2, "ab", 1),
        (sync.Hierarchical(), 2, "ab", 2),
        (sync.Hierarchical(), 1, "aabb", 2),
        (sync.Hierarchical(), 1, "a", 1),
        (sync.Hierarchical(group=4), 2, "abcd", 4),
    ],
)
def test_a_rule_says_how_many_replicas_make_each_step_together(rule, devices, hosts, size):
    assert isinstance(rule, sync.Rule)
    assert rule.team_size(devices, list(hosts)) == size


@pytest.mark.parametrize("hosts, said", [("aab", "2 on a, 1 on b"), ("abab", "1 on a, 1 on b")])
def test_hosts_that_make_no_groups_are_named(hosts, said):
    with pytest.raises(ValueError, match=said):
        sync.Hierarchical().team_size(1, list(hosts))


def test_one_group_has_nobody_to_agree_with(caplog):
    strategy = make(sync.Hierarchical())
    assert "all 4 replicas are of one group" in caplog.text
    assert strategy.rounds is None


def test_workers_compare_all_settings():
    settings = [{}, {"group": 2}, {"outer": sync.LocalSGD(50)}]
    settings.append({"outer": sync.DiLoCo(50, wire="int8")})
    assert len({sync.Hierarchical(**each).describe() for each in settings}) == len(settings)


def test_accumulation_is_refused_where_steps_are_eager():
    strategy = make(sync.Hierarchical(group=2))
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = regression(strategy, optimizer, run_eagerly=True)
    with pytest.raises(ValueError, match="cannot accumulate gradients in a model"):
        fit(model)
