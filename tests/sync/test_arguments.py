"""Arguments that rules and strategies refuse, and their errors."""

import keras
import pytest

from tfscale import ScaleStrategy, sync
from tfscale.compression import PowerSGD

DEVICES = ["CPU:0", "CPU:1"]
_TENSORFLOW = {"backend": "tensorflow", "algorithm": "auto"}


def one_way(replicas):
    return [[(0, 1)], [(1, 0)]]


def backwards(replicas):
    return [[(r, (r - 1) % replicas) for r in range(replicas)]]


def make(rule, **settings):
    return ScaleStrategy(**{"algorithm": "ring", "devices": DEVICES, "sync": rule} | settings)


class Forgets(sync.Rule):
    """A user's, that names what it does not keep."""

    every = 4
    in_shards = ("changes",)


class Endless(sync.Rule):
    """A user's, that does not say how long its rounds are."""

    def end(self, round):
        pass


def lasting(every=None, table=None):
    """Return a user's rule whose rounds have these lengths."""
    rule = Forgets()
    rule.in_shards = ()
    if every is not None:
        rule.every = every
    if table is not None:
        rule.table = lambda: table
    return rule


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda: sync.LocalSGD(0), "every is .* number of steps, 1 or more"),
        (
            lambda: sync.LocalSGD(2.5),
            "tfscale.sync.Period or a number of steps, 1 or more; got 2.5",
        ),
        (lambda: sync.LocalSGD(8, start=-1), "start is a number of steps, 0 or more; got -1"),
        (lambda: sync.LocalSGD(8, average=("momenta",)), r'\("weights", "optimizer"\); got'),
        (lambda: sync.Period(0, 4, 2), "first is a number of steps"),
        (lambda: sync.DiLoCo(8, outer="sgd"), "a function that makes one"),
        (lambda: sync.DiLoCo(8, wire="int9"), "int9"),
        (lambda: sync.DiLoCo(8, wire="int8", method=PowerSGD(2)), "Leave one of them out"),
        (lambda: sync.DiLoCo(9, fragments=2), "a multiple of 2 steps; got 9"),
        (lambda: sync.DiLoCo(sync.Period(1, 8, 3), fragments=2), "a multiple of 2 steps"),
        (lambda: sync.DiLoCo(8, fragments=0), "fragments is a number of parts, 1 or more; got 0"),
        (lambda: sync.DiLoCo(8, fragments=2, delay=4), "delay must be less than 4 steps, got 4"),
        (lambda: sync.DiLoCo(8, delay=2, blend=1.0), "0 or more and less than 1; got 1"),
        (lambda: sync.DiLoCo(8, blend=0.5), "with a delay; got 0.5"),
        (lambda: sync.DiLoCo(8, delay=2, method=PowerSGD(2)), "more than one exchange"),
        (lambda: sync.DiLoCo(8, outer=dict).make_outer(), "made {}"),
        (lambda: make(Endless()), "Endless.* does not say how many steps.*every: int = 4"),
        (lambda: make(lasting(0)), r"every of sync=Forgets\(...\) is a number of steps.*got 0"),
        (lambda: make(lasting(2.5)), "every of sync=Forgets.* define table.*got 2.5"),
        (lambda: make(lasting([1, 2])), r"every of sync=Forgets.* define table.*got \[1, 2\]"),
        (
            lambda: make(lasting(table=[])),
            r"table\(\) of sync=Forgets.* a list of numbers of steps",
        ),
        (lambda: make(lasting(table=[1, 0])), r"table\(\)\[1\] of sync=Forgets.* 1 or more; got 0"),
        (lambda: make(sync.LocalSGD), "This is the class: pass an instance, such as LocalSGD"),
        (lambda: make(Forgets()), "names 'changes' in in_shards, but not in keeps"),
        (lambda: sync.ElasticAveraging(8, alpha=0), "alpha is .*more than 0 and at most 1; got 0"),
        (lambda: make(sync.ElasticAveraging(8, alpha=0.9)), "alpha times 3 must be less than 2"),
        (lambda: sync.Gossip(0), "every is .* number of steps, 1 or more"),
        (lambda: sync.Gossip(1, "rnig"), "topology is .* got 'rnig'. Did you mean 'ring'"),
        (lambda: sync.Gossip(1, [[(0, 1)]]), "a function from a number of ranks to a list"),
        (lambda: sync.Gossip(1, "random", seed=0.5), "seed is a whole number; got 0.5"),
        (lambda: sync.Gossip(1, wire="bf61"), "'bf61'.*bf16"),
        (
            lambda: make(sync.Gossip(1, one_way)),
            "would change the mean of all weights.* do not sum to 1",
        ),
        (lambda: make(sync.Gossip(1, lambda p: [[(0, 1)]])), "rank 0 hears of 1 of 2 ranks"),
        (lambda: make(sync.Gossip(1, lambda p: [[(0, 2)]])), "different ranks of 0..1, got"),
        (lambda: make(sync.Gossip(), wire="int8"), "has no effect.*replicas send no gradients"),
        (lambda: make(sync.Gossip(), **_TENSORFLOW), "sync=Gossip.*own"),
        (lambda: make("diloco"), "sync is a rule of tfscale.sync"),
        (lambda: make(sync.LocalSGD(8), wire="int8"), "has no effect.*replicas send no gradients"),
        (lambda: make(sync.DiLoCo(8), method=PowerSGD(2)), "Give the argument to the rule instead"),
        (lambda: make(sync.LocalSGD(8), **_TENSORFLOW), "sync=LocalSGD.*own"),
    ],
)
def test_what_is_wrong_is_refused_at_once(wrong, said):
    with pytest.raises(ValueError, match=said):
        wrong()


def test_a_period_grows_and_shrinks():
    assert sync.Period(1, 16, 4).table() == [1, 2, 4, 8, 16]
    assert sync.Period(9, 1, 2).table() == [9, 3, 1]
    assert [sync.Period(2, 4, 1).steps(r) for r in (0, 1, 7)] == [2, 4, 4]


def test_wires_have_feedback_unless_told_otherwise():
    def method(**how):
        return sync.DiLoCo(8, **how).policy.method

    assert method(wire="int8").feedback
    assert not method(wire="int8", error_feedback=False).feedback
    assert method().lossless
    assert method(method=PowerSGD(2)) == PowerSGD(2)


def test_workers_compare_all_settings():
    """Outer optimizers too: replicas would else go apart for good."""
    described = {
        rule.describe()
        for rule in (
            sync.DiLoCo(8),
            sync.DiLoCo(8, outer=lambda: keras.optimizers.SGD(0.7)),
            sync.DiLoCo(8, outer=lambda: keras.optimizers.Adam(0.7)),
            sync.DiLoCo(8, wire="int8"),
            sync.DiLoCo(8, wire="int8", error_feedback=False),
            sync.DiLoCo(9),
            sync.DiLoCo(8, fragments=2),
            sync.DiLoCo(8, fragments=2, delay=1),
            sync.DiLoCo(8, fragments=2, delay=1, blend=0.1),
            sync.LocalSGD(8),
            sync.LocalSGD(8, start=3),
            sync.Gossip(8),
            sync.Gossip(8, "random"),
            sync.Gossip(8, "random", seed=1),
            sync.Gossip(8, backwards),
            sync.EveryStep(),
        )
    }
    assert len(described) == 16
    assert " at 0x" not in sync.Gossip(8, backwards).describe()
    given = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    assert sync.DiLoCo(8, outer=given).describe() == sync.DiLoCo(8).describe()


class Plain(sync.Rule):
    """A user's rule that is no dataclass."""

    def __init__(self, every, strength):
        self.every, self.strength = every, strength


def test_a_rule_is_known_by_its_settings():
    """The place in memory does not matter: workers compare settings."""
    assert sync.DiLoCo(8, wire="int8").describe() != sync.DiLoCo(8).describe()
    assert repr(sync.DiLoCo(8, wire="int8")) == "DiLoCo(every=8, wire='int8')"
    assert repr(sync.DiLoCo(8, delay=2)) == "DiLoCo(every=8, delay=2)"
    assert Plain(8, 0.5).describe() == "Plain(every=8, strength=0.5)"


def test_one_replica_has_nobody_to_agree_with(caplog):
    strategy = ScaleStrategy(devices=["CPU:0"], sync=sync.DiLoCo(8))
    assert "sync=DiLoCo" in caplog.text and "has no effect" in caplog.text
    assert strategy.rounds is None
