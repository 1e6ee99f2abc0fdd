"""Shares of the global batch: replicas take unequal numbers of rows, and train as one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once
from tests.strategy.twins import two
from tfscale import Grid, ScaleStrategy, sync
from tfscale.strategy.balance import Window, wanted
from tfscale.strategy.shares import UNIT, Shares, ends, weights_of

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)

# ------------------------------------------------------------------- how a batch is cut


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 64, 1000, 1 << 22])
@pytest.mark.parametrize("shares", [[1], [3, 1], [1, 1, 1], [1, 1000, 1], [0.2, 0.3, 0.5, 7, 1e-9]])
def test_rows_add_up_and_nobody_is_left_out(shares, rows):
    weights = np.array(weights_of(shares, len(shares), 1))
    until = ends(weights, np.int64(rows))
    parts = np.diff(until, prepend=0)
    assert until[-1] == rows and (parts >= min(1, rows // len(shares))).all()
    exact = rows * weights / weights.sum()
    if (exact >= 1).all():
        assert (abs(parts - exact) < 1).all()
    assert ends(tf.constant(weights), tf.constant(rows, tf.int64), tf).numpy().tolist() == [*until]


def test_a_proportion_that_divides_is_exact():
    assert ends(np.array(weights_of([3, 1], 2, 1)), np.int64(64)).tolist() == [48, 64]
    assert weights_of({"worker:1": 0.5, "replica:0": 1}, 4, 2) == [UNIT, UNIT, UNIT // 2, UNIT // 2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2, 3], "3 numbers, and there are 2 replicas"),
        ({"worker:3": 1}, "worker:3, and the workers have the numbers 0 to 0"),
        ({"replica:2": 1}, "replica:2, and the replicas have the numbers 0 to 1"),
        ([1, 0], "more than 0; got 0"),
        ("equal", "'auto'"),
        ({"gpu:0": 1}, "'auto'"),
        ([], "'auto'"),
    ],
)
def test_wrong_shares_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        two(shares=given)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"grid": Grid(tensor=2), "tensor": {".": "columns"}}, "replicas share a model"),
        ({"grid": Grid(experts=2)}, "replicas share a model"),
        ({"sync": sync.LocalSGD(4)}, "all count equally"),
        ({"sync": sync.DiLoCo(4)}, "all count equally"),
        ({"shares": "auto", "sync": sync.BoundedStaleness(2)}, "make them apart"),
        ({"shares": "auto", "shard": "all"}, "waits for weights"),
        ({"shares": "auto", "backend": "tensorflow"}, "shares='auto' needs tfscale's own"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(settings, said):
    with pytest.raises(ValueError, match=said) as refused:
        ScaleStrategy(devices=["CPU:0", "CPU:1"], **({"shares": [3, 1]} | settings))
    assert "shares=" in str(refused.value)


def test_data_that_cannot_be_cut_is_refused():
    strategy = two(shares=[3, 1])
    with pytest.raises(ValueError, match="Call dataset.batch"):
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))
    with pytest.raises(ValueError, match="experimental_distribute_dataset"):
        strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.range(3).batch(1))


def parts(strategy, batch):
    return [part.numpy().tolist() for part in strategy.experimental_local_results(batch)]


def test_replicas_take_their_shares_in_loops_and_functions():
    strategy = two(shares=[3, 1])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(4))
    cut = [[[0, 1, 2], [3]], [[4, 5, 6], [7]], [[8], []]]
    assert [parts(strategy, batch) for batch in data] == cut

    @tf.function
    def sums(dataset):
        found = tf.zeros([2], tf.int64)
        for batch in dataset:
            own = strategy.experimental_local_results(strategy.run(tf.reduce_sum, [batch]))
            found += tf.stack(own)
        return found

    assert sums(data).numpy().tolist() == [0 + 1 + 2 + 4 + 5 + 6 + 8, 3 + 7]


# ------------------------------------------------------------------- k replicas = one device

# Each worker reads rows of its own.
REFUSED = ("shard_file", "shard_off")
QUICK = {
    ("shares", "2x1"): (
        *("sgd", "batch_norm_adam", "masked_lstm", "last_batch_of_1", "batch_of_1", "judge"),
        *("accumulate_and_clip", "dataset", "steps_per_execution", "own_step", "py_dataset"),
    ),
    ("measured", "1x2"): ("run_eagerly", "two_optimizers", "sparse_input_adam"),
    ("measured", "2x1"): ("adam", "batch_norm", "steps_per_execution", "float16_overflow"),
}


def pairs():
    for strategy in ("shares", "measured"):
        for layout in ("1x2", "2x1", "2x2"):
            quick = QUICK.get((strategy, layout), ())
            for name, case in BY_NAME.items():
                if layout in case.layouts and name not in REFUSED:
                    marks = [] if name in quick else pytest.mark.full
                    yield pytest.param(strategy, layout, name, marks=marks)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, ("1x2", "2x1", "2x2"))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "layout", "case"), list(pairs()))
def test_replicas_with_shares_train_as_one_device(trained, strategy, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(strategy, layout)[case],
        lambda: take("exact.py", strategy, layout, [case])[case],
    )


def test_replicas_with_late_sums_may_have_shares():
    """Gradients are weighted by rows, so shares do not change them."""
    found = []
    for shares in (None, [3, 1]):
        keras.utils.set_random_seed(1)
        with two(sync=sync.BoundedStaleness(2), shares=shares).scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
        model.fit(x, x.sum(1), batch_size=8, epochs=3, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, 0, 1e-6)


# ------------------------------------------------------------------- measured shares


def shares_of(replicas):
    return Shares("auto", replicas, [f"/device:CPU:{i}" for i in range(replicas)], 0)


def test_all_replicas_are_to_finish_together():
    shares = shares_of(2)
    window = Window(10, np.array([320, 320]), np.array([1000, 3000]))
    made, saves = wanted(shares, shares.weights.numpy(), window)
    assert np.allclose(np.array(made) / sum(made), [0.75, 0.25], atol=1e-4)
    assert saves == pytest.approx(0.5)


def test_a_change_that_no_row_follows_saves_nothing():
    shares = shares_of(2)
    window = Window(10, np.array([20, 20]), np.array([1000, 1200]))  # 2 rows each: 3 and 1 is worse
    assert wanted(shares, shares.weights.numpy(), window)[1] <= 0.05


def test_nothing_is_decided_by_steps_that_were_not_measured():
    shares = shares_of(2)
    window = Window(10, np.array([20, 0]), np.array([1000, 1]))
    assert wanted(shares, shares.weights.numpy(), window) == ([1, 1], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["follows", "restarts", "says", "names"])
def test_measured_shares(case):
    for record in take("shares.py", "scale", "2x1", [case])[case]:
        assert "error" not in record, record["error"]
