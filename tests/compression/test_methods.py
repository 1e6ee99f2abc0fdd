"""Every method against the same computed in numpy, and what holds for all of them."""

import dataclasses
import itertools
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.compression.methods import Trial, assert_conserved, gradients
from tests.covering import grid, singles
from tfscale import ScaleStrategy
from tfscale.collectives import Link
from tfscale.collectives.choose import Chooser
from tfscale.compression import (
    Gradient,
    Kept,
    Method,
    MethodPolicy,
    PowerSGD,
    Price,
    RandomK,
    TopK,
    Wire,
    low_rank,
    sparse,
)
from tfscale.exchange.bucket_sum import BucketSum
from tfscale.exchange.collective_schedules import Fixed, price
from tfscale.native import compression as ops

FULL = pytest.mark.full
SHAPES = [(12, 20), (3, 3, 4, 10), (7, 5)]
CLOSE = 1e-6
WITH_FEEDBACK = [
    Wire("int4"), Wire("int8", True), Wire("sign"),
    PowerSGD(2, saves=0), PowerSGD(2, factors="bf16", saves=0),
    PowerSGD(1, factors="int8", saves=0), TopK(0.05), TopK(0.05, wire="int8"),
    TopK(0.6), TopK(0.6, wire="int8"),
    RandomK(0.1), RandomK(0.1, wire="bf16"),
]  # fmt: skip
WITHOUT = [PowerSGD(2, feedback=False, saves=0), TopK(0.1, feedback=False),
           TopK(0.6, feedback=False), RandomK(0.1, feedback=False)]  # fmt: skip


def matrix(x):
    return np.reshape(x, [-1, np.shape(x)[-1]])


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=CLOSE * np.abs(other).max())


def powersgd(given, factors, rests):
    """A step as the paper has it, in float64; ``rests[variable][replica]``."""
    found = []
    for of_replicas, q, rest in zip(given, factors, rests, strict=True):
        parts = [matrix(g) + matrix(e) for g, e in zip(of_replicas, rest)]
        p, _ = np.linalg.qr(sum(m @ q.T for m in parts))
        total = sum(m.T @ p for m in parts)
        found.append(np.reshape(p @ total.T, of_replicas[0].shape))
    return found


@pytest.mark.one_in(2)
@grid("rank, feedback, replicas", [1, 3], [True, False], [2, 3])
def test_powersgd_is_the_papers(rank, feedback, replicas):
    """Each step, from what the steps before have left."""
    method = PowerSGD(rank, feedback, saves=0)
    trial = Trial(method, SHAPES, replicas)
    nothing = [np.zeros((replicas, *shape)) for shape in SHAPES]
    trial.sums([[np.zeros(shape, "float32")] * replicas for shape in SHAPES])
    for step in range(4):
        given = gradients(SHAPES, replicas, step)
        rests = trial.kept("residual") if feedback else nothing
        factors = [np.asarray(q, float) for q in trial.kept("factor")]
        expected = powersgd(given, factors, [np.asarray(rest, float) for rest in rests])
        assert_close(trial.sums(given), expected)


@pytest.mark.parametrize("rank", [5, 100])
def test_powersgd_of_full_rank_is_exact(rank):
    shapes = [(7, 5), (5, 7)]
    trial = Trial(PowerSGD(rank, saves=0), shapes)
    for step in range(3):
        given = gradients(shapes, seed=step)
        assert_close(trial.sums(given), [sum(g) for g in given])


def largest(x, fraction):
    """The places of the largest numbers of each replica."""
    count = max(1, int(np.ceil(fraction * x.size)))
    return np.argsort(-np.abs(x.ravel()), kind="stable")[:count]


@pytest.mark.one_in(6)
@grid("fraction, momentum, replicas", [0.02, 0.3, 1.0], [0.0, 0.5], [2, 3])
def test_top_k(fraction, momentum, replicas):
    trial = Trial(TopK(fraction, momentum=momentum), SHAPES, replicas)
    rests = [[np.zeros(shape) for _ in range(replicas)] for shape in SHAPES]
    speeds = [[np.zeros(shape) for _ in range(replicas)] for shape in SHAPES]
    for step in range(4):
        given = gradients(SHAPES, replicas, step)
        expected = []
        for i, of_replicas in enumerate(given):
            total = np.zeros(of_replicas[0].size)
            for replica, g in enumerate(of_replicas):
                speeds[i][replica] = momentum * speeds[i][replica] + g
                rests[i][replica] = rests[i][replica] + speeds[i][replica]
                chosen = largest(rests[i][replica], fraction)
                total[chosen] += rests[i][replica].ravel()[chosen]
                rests[i][replica].ravel()[chosen] = 0
                speeds[i][replica].ravel()[chosen] = 0
            expected.append(np.reshape(total, of_replicas[0].shape))
        assert_close(trial.sums(given), expected)


def test_top_k_joins_or_sums_whole_tensors_by_price():
    """Each of 4 replicas has 2048 numbers; joined, it sends 24 bytes for each that it chooses."""

    def explained(fraction):
        trial = Trial(TopK(fraction), [(32, 64)], 4)
        trial.sums(gradients([(32, 64)], 4))
        return trial.strategy.explain()[0]

    below, above = explained(0.24), explained(0.26)
    assert (below.bytes, below.sent) == (2 * 492 * 8, 492 * 24)
    assert "joined; for 11,808 bytes; a sum of whole tensors costs 12,288 bytes" in below.words
    assert (above.bytes, above.sent) == (2048 * 4, 12_288)
    assert "summed, for 12,288 bytes; gathering the parts costs 12,792 bytes" in above.words
    assert "does not pay here: the wire 'fp32' sends as much and loses less" in above.words


def test_prices_of_measured_links_are_seconds():
    """A gigabit, and much faster links, where messages are what costs."""
    wide, fast = (Chooser(Link(1e-5, beta), 0.0, 16) for beta in (8e-9, 1e-15))
    rows, whole = 2 * [1000 * 4], [1000 * 16]
    assert price(wide, 16, [], rows).amount == pytest.approx(15 * 2 * (1e-5 + 8e-9 * 4000))
    assert price(wide, 16, whole, []).amount == wide.choose(16000).seconds
    assert price(fast, 16, whole, []) < price(fast, 16, [], rows)
    assert str(Price(0.00123, "seconds")) == "1.23 ms"
    central = price(Fixed("central", 4), 4, whole, [])
    assert central == Price(3 * 16000, "bytes")


@pytest.mark.one_in(2)
@grid(
    "fraction, momentum, feedback, replicas",
    [0.05, 0.8],
    [0.0, 0.5],
    [True, False],
    [2, 4],
    aspects=singles,
)
def test_top_k_joined_or_summed_is_the_same(fraction, momentum, feedback, replicas, monkeypatch):
    method = TopK(fraction, feedback, momentum=momentum if feedback else 0.0)
    trial, other = Trial(method, SHAPES, replicas), Trial(method, SHAPES, replicas)
    given = [gradients(SHAPES, replicas, step) for step in range(3)]
    found = [trial.sums(each) for each in given]
    priced = BucketSum.price

    def turned(load, **sizes):
        price = priced(load, **sizes)
        return dataclasses.replace(price, amount=-price.amount)

    monkeypatch.setattr(BucketSum, "price", turned)
    for each, sums in zip(given, found):
        assert_close(other.sums(each), sums)
    rows = [one.strategy.explain()[0] for one in (trial, other)]
    assert len(rows[0].collectives) + len(rows[1].collectives) == 3
    for name in ["residual"] * feedback + ["velocity"] * bool(method.momentum):
        for one, same in zip(trial.kept(name), other.kept(name)):
            np.testing.assert_allclose(one, same, rtol=0, atol=CLOSE * np.abs(same).max())


def test_top_k_on_one_bit_sends_nothing_where_nothing_is_chosen():
    """Though a sum of whole tensors would cost less: there, zeros would arrive as signs."""
    (of_replicas,) = gradients([(40, 50)], 1)
    (found,) = Trial(TopK(0.6, wire="sign"), [(40, 50)], 4).sums([[of_replicas[0]] * 4])
    np.testing.assert_array_equal(np.flatnonzero(found), np.sort(largest(of_replicas[0], 0.6)))


def test_random_k_sends_the_same_places_of_all_and_others_in_each_step():
    trial = Trial(RandomK(0.1), [(40, 50)])
    rests, seen = [0.0, 0.0], []
    for step in range(4):
        given = gradients([(40, 50)], seed=step)
        (total,) = trial.sums(given)
        chosen = total != 0
        assert chosen.sum() == 200
        parts = [g + e for g, e in zip(given[0], rests)]
        np.testing.assert_allclose(total[chosen], sum(parts)[chosen], atol=1e-5)
        rests = [np.where(chosen, 0, part) for part in parts]
        seen.append(chosen)
    assert all((one != other).any() for one, other in itertools.pairwise(seen))


def test_random_k_without_feedback_is_right_on_average():
    trial = Trial(RandomK(0.25, feedback=False), [(10, 20)])
    given = gradients([(10, 20)])
    steps = 400
    mean = sum(trial.sums(given)[0].astype(float) for _ in range(steps)) / steps
    exact = sum(given[0])
    deviation = np.abs(exact) * np.sqrt((1 / 0.25 - 1) / steps)
    assert np.abs(mean - exact).max() < 5 * deviation.max()
    assert np.sqrt(np.mean(((mean - exact) / deviation) ** 2)) < 1.2


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "method",
    [m if i % 2 else pytest.param(m, marks=FULL) for i, m in enumerate(WITH_FEEDBACK)],
    ids=repr,
)
def test_nothing_is_lost_only_late(method):
    given = [gradients(SHAPES, 3, seed) for seed in range(3)]
    assert_conserved(Trial(method, SHAPES, 3), given, steps=7)


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ("halving", TopK(0.1)),
        ("hierarchical", PowerSGD(2, saves=0)),
        pytest.param("tree", RandomK(0.2), marks=FULL),
        pytest.param("direct", TopK(0.1), marks=FULL),
    ],
)
def test_the_algorithm_does_not_matter(algorithm, method):
    """Compare one step. Differences of rounding grow with each further step, as in any training."""
    for seed in range(2):
        given = gradients(SHAPES, 4, seed)
        found = Trial(method, SHAPES, 4, algorithm).sums(given)
        assert_close(found, Trial(method, SHAPES, 4).sums(given))


@pytest.mark.one_in(8)
@grid("bad, method", [np.nan, np.inf, -np.inf], WITH_FEEDBACK + WITHOUT, aspects=singles)
def test_what_is_not_finite_arrives_and_leaves_no_trace(bad, method):
    """The sums tell it, and the next steps are as if there had been none such."""
    shapes = [(12, 20), (7, 5)]
    trial, other = Trial(method, shapes), Trial(method, shapes)
    first, second = gradients(shapes, seed=1), gradients(shapes, seed=2)
    spoilt = gradients(shapes, seed=3)
    spoilt[0][1][3, 4] = bad
    spoilt[1][0][1, 1] = bad
    for each in (trial, other):
        each.sums(first)
    found = trial.sums(spoilt)
    assert not any(np.isfinite(each).all() for each in found)
    if method.random:
        assert all(np.isfinite(each).all() for each in trial.sums(second))
    else:
        for one, same in zip(trial.sums(second), other.sums(second)):
            np.testing.assert_array_equal(one, same)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_size_of_gradients_does_not_matter(size):
    """Loss scaling makes them large, and the end of a training small."""
    shapes = [(12, 20)]
    for method in (PowerSGD(2, saves=0), TopK(0.1)):
        trial, usual = Trial(method, shapes), Trial(method, shapes)
        for seed in range(3):
            given = gradients(shapes, seed=seed)
            found = trial.sums([[np.float32(size) * g for g in each] for each in given])
            np.testing.assert_allclose(found[0] / size, usual.sums(given)[0], atol=1e-4)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("method", WITH_FEEDBACK + WITHOUT, ids=repr)
def test_zeros_stay_zeros(method):
    trial = Trial(method, [(8, 9), (4, 4)])
    nothing = [[np.zeros(shape, "float32")] * 2 for shape in [(8, 9), (4, 4)]]
    for _ in range(2):
        assert not any(total.any() for total in trial.sums(nothing))
    assert all(np.isfinite(total).all() for total in trial.sums(gradients([(8, 9), (4, 4)])))


def test_random_k_of_few_numbers_is_right_on_average():
    """One of five: the part that is sent is not the part that was asked for."""
    trial = Trial(RandomK(0.1, feedback=False), [(5,)])
    given = [[np.ones(5, "float32")] * 2]
    mean = sum(trial.sums(given)[0] for _ in range(300)) / 300
    assert np.abs(mean - 2).max() < 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_residuals_on_ternary_do_not_grow(fraction):
    """Residuals would grow if the gathered numbers were rounded at random."""
    trial = Trial(TopK(fraction, wire="ternary"), [(40, 50)])
    sizes = []
    for step in range(30):
        trial.sums(gradients([(40, 50)], seed=step))
        sizes.append(np.abs(trial.kept("residual")[0]).mean())
    assert sizes[-1] < 3 * sizes[4]


def test_gradients_whose_shape_is_not_known_while_a_step_is_traced():
    """Such as those of products with sparse tensors."""
    for method in (Wire(), Wire("int8"), PowerSGD(1, saves=0), TopK(0.5)):
        trial = Trial(method, [(6, 8)])
        usual = trial.strategy.reducer.reduce

        def reduce(own, *others, usual=usual):
            return usual([tf.reshape(g, tf.cast(tf.shape(g) + 0, tf.int32)) for g in own], *others)

        trial.strategy.reducer.reduce = reduce
        given = gradients([(6, 8)])
        assert trial.sums(given)[0].shape == (6, 8)


def test_names_of_what_is_kept_fit_into_files():
    @dataclasses.dataclass(frozen=True)
    class Odd(Method):
        def state(self, gradient):
            return {"first moment": Kept(gradient.shape)}

    with pytest.raises(ValueError, match="declares the name 'first moment'"):
        Trial(Odd(), [(5, 5)]).sums(gradients([(5, 5)]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [TopK(0.1), *(pytest.param(m, marks=FULL) for m in (PowerSGD(1, saves=0), Wire("int4")))],
    ids=repr,
)
def test_what_is_kept_has_no_loss_scale(method):
    """A scale that doubles from step to step changes no weight, but for rounding."""
    import keras

    def train(growth):
        keras.utils.set_random_seed(1)
        with ScaleStrategy("ring", None, ["CPU:0", "CPU:1"], method={"kernel": method}).scope():
            model = keras.Sequential([keras.Input([32]), keras.layers.Dense(48)])
            sgd = keras.optimizers.SGD(0.1)
            scaler = keras.optimizers.LossScaleOptimizer(sgd, 1.0, dynamic_growth_steps=growth)
            model.compile(scaler, "mse")
        x = np.random.default_rng(1).standard_normal((64, 32)).astype("float32")
        model.fit(x, np.repeat(x, 2, 1)[:, :48], batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()[0], float(scaler.dynamic_scale)

    (plain, one), (scaled, grown) = train(10**6), train(1)
    assert one == 1 and grown > 1000
    np.testing.assert_allclose(scaled, plain, rtol=0, atol=1e-5)


def test_gradients_in_halves():
    """Under mixed precision Keras's variables are float32; these are not."""
    import keras

    for method in (PowerSGD(1, saves=0), TopK(0.5), RandomK(0.5)):
        trial = Trial(method, [])
        with trial.strategy.scope():
            trial.variables = [keras.Variable(tf.zeros([6, 6]), dtype="float16", name="half")]
            trial.optimizer = keras.optimizers.SGD(1.0)
            trial.optimizer.build(trial.variables)
        (total,) = trial.sums([[np.eye(6, dtype="float16")] * 2])
        assert total.dtype == np.float16


def test_policies_choose_methods():
    policy = MethodPolicy.of({"embedding": TopK(0.01), "kernel$": PowerSGD(4), "*": "int8"})
    chosen = {
        ("embedding/embeddings", (1000, 64)): TopK(0.01),
        ("dense/kernel", (512, 512)): PowerSGD(4),
        ("dense/bias", (512,)): Wire(),
        ("conv/kernel", (3, 3, 64, 64)): PowerSGD(4),
        ("tiny/kernel", (4, 4)): Wire(),  # no matrix for rank 4
        ("other/table", (512, 512)): Wire("int8"),
        ("norm/gamma", (512,)): Wire(),
    }
    for (path, shape), method in chosen.items():
        assert policy.method_of(Gradient(path, shape, "float32")) == method
    assert eval(repr(policy)) == policy
    assert policy != MethodPolicy.of({"embedding": TopK(0.02)})
    with pytest.raises(TypeError, match=r"is int32, and .* carries only float32"):
        policy.method_of(Gradient("embedding/count", (1000, 64), "int32"))


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda: PowerSGD(0), "rank is a number of columns, 1 or more; got 0"),
        (lambda: PowerSGD(1.5), "got 1.5"),
        (lambda: PowerSGD(1, factors="int7"), "int7"),
        (lambda: PowerSGD(1, otherwise="int7"), "int7"),
        (lambda: PowerSGD(saves=-1), "saves is a factor"),
        (lambda: TopK(0), "fraction is the part of a gradient's numbers"),
        (lambda: TopK(1.1), "got 1.1"),
        (lambda: TopK(momentum=1), "momentum is a number, 0 or more and less than 1; got 1"),
        (lambda: TopK(feedback=False, momentum=0.5), "Leave out momentum, or feedback=False"),
        (lambda: RandomK(-1), "got -1"),
        (lambda: Wire("int7"), "int7"),
        (lambda: Wire("int8", "yes"), "feedback is True or False; got 'yes'"),
        (lambda: MethodPolicy.of(7), "method is .* or a method of tfscale.compression.*got 7"),
        (
            lambda: MethodPolicy.of({"*": int}),
            "method.* a method of tfscale.compression.*got <class",
        ),
        (lambda: ScaleStrategy(method="int8", wire="int8"), "Leave one of them out"),
        (lambda: ScaleStrategy(method="int8", error_feedback=True), "Leave one of them out"),
        (lambda: ScaleStrategy(method=PowerSGD), "method is .* a method of tfscale.compression"),
        (
            lambda: ScaleStrategy(method=PowerSGD(factors="int8"), backend="tensorflow"),
            r"sends the results of PowerSGD\(4\) \+ feedback as 'fp32' only",
        ),
        (
            lambda: ScaleStrategy(method=Wire("bf16", True), backend="tensorflow"),
            r"has no error feedback, which Wire\(name='bf16', feedback=True\) needs",
        ),
    ],
)
def test_refusals_say_what_was_received(wrong, words):
    with pytest.raises((TypeError, ValueError)) as refused:
        wrong()
    assert re.search(words, str(refused.value)), refused.value


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "method", [PowerSGD(2, saves=0), TopK(0.1), RandomK(0.2)], ids=lambda m: type(m).__name__
)
def test_by_tensorflows_collectives(method):
    given = [gradients(SHAPES, seed=seed) for seed in range(2)]
    trial, ours = (
        Trial(method, SHAPES, backend="tensorflow", algorithm="auto"),
        Trial(method, SHAPES),
    )
    for each in given:
        assert_close(trial.sums(each), ours.sums(each))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "method",
    [
        PowerSGD(3, saves=0),
        PowerSGD(2, factors="bf16", saves=0),
        TopK(0.1),
        TopK(0.1, momentum=0.5),
    ],
    ids=repr,
)
def test_in_cpp_it_is_the_same_as_by_tensorflows_operations(method, monkeypatch):
    """Replicas on GPUs use TensorFlow's operations."""
    fused = Trial(method, SHAPES)
    given = [gradients(SHAPES, seed=seed) for seed in range(3)]
    found = [fused.sums(each) for each in given]
    monkeypatch.setattr(low_rank, "_Fused", lambda load: low_rank._Plain(load, True))
    monkeypatch.setattr(sparse, "_Fused", lambda load, g: sparse._Plain(load, g, True))
    plain = Trial(method, SHAPES)
    for each, expected in zip(given, found):
        for one, other in zip(plain.sums(each), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    for one, other in zip(plain.kept("residual"), fused.kept("residual")):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_place_that_a_peer_made_up_is_refused():
    residual = tf.Variable(tf.zeros([4]))
    for place in (-1, 4):
        with pytest.raises(tf.errors.InvalidArgumentError, match="outside of 4 numbers"):
            ops.sum_at(tf.zeros([4]), [0], [0.0], [place], [1.0], True, residual)
    np.testing.assert_array_equal(residual, 0)
