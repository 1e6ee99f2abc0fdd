"""Shares of the global batch: replicas take unequal numbers of rows, and train as one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once
from tests.strategy.restless import make_restless
from tests.strategy.twins import two
from tfscale import Grid, ScaleStrategy, sync
from tfscale.strategy.batch.share_search import ShareSearch, Window
from tfscale.strategy.batch.shares import UNIT, Shares, ends, weights_of

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
        ({"shares": "auto", "sync": sync.BoundedStaleness(2, skips=True)}, "Leave out skips"),
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
        *("batch_norm_adam", "masked_lstm", "last_batch_of_1", "judge"),
        *("accumulate_and_clip", "dataset", "steps_per_execution", "own_step_clips", "py_dataset"),
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


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("strategy", "layout", "case"), list(pairs()))
def test_replicas_with_shares_train_as_one_device(trained, strategy, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(strategy, layout)[case],
        lambda: take("exact.py", strategy, layout, [case])[case],
    )


@pytest.fixture
def restless(monkeypatch):
    make_restless(monkeypatch.setattr)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [[3, 1], "auto"])
def test_replicas_with_late_sums_may_have_shares(restless, shares):
    """Gradients are weighted by rows, so shares do not change them."""
    found = []
    for given in (None, shares):
        keras.utils.set_random_seed(1)
        strategy = two(sync=sync.BoundedStaleness(2), shares=given)
        with strategy.scope():
            model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.random.default_rng(0).standard_normal((40, 3)).astype("float32")
        model.fit(x, x.sum(1), batch_size=8, epochs=4, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, 0, 1e-6)
    assert strategy.balance is None or len(strategy.balance.changes) > 2


def loop(strategy, how):
    """Train in a loop of one's own; return the weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build(model.trainable_variables)
    x = np.random.default_rng(0).standard_normal((61, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8).repeat(3)

    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum((model(x) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=8)
        return tape.gradient(loss, model.trainable_variables)

    def step(x, y):
        if how == "microbatches":  # a replica of fewer rows makes fewer of them
            gradients = [tf.zeros_like(v) for v in model.trainable_variables]
            for begin in tf.range(0, tf.shape(x)[0], 2):
                more = gradients_of(x[begin : begin + 2], y[begin : begin + 2])
                gradients = [tf.add(one, other) for one, other in zip(gradients, more)]
        else:
            gradients = gradients_of(x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    inner = tf.function(step) if how == "function of a replica" else step

    def whole(batch):
        strategy.run(inner, args=batch)

    whole = tf.function(whole) if how in ("function", "microbatches") else whole
    for batch in strategy.experimental_distribute_dataset(data):
        whole(batch)
    return model.get_weights()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["function", "microbatches", "function of a replica", "eager"])
def test_loops_of_users_measure_shares(restless, how):
    expected = loop(tf.distribute.get_strategy(), how)
    strategy = two(shares="auto")
    for one, other in zip(expected, loop(strategy, how), strict=True):
        np.testing.assert_allclose(other, one, 0, 1e-6)
    assert len(strategy.balance.changes) > 2


# ------------------------------------------------------------------- measured shares


def search(replicas):
    shares = Shares("auto", replicas, [f"/device:CPU:{i}" for i in range(replicas)], 0)
    return ShareSearch(shares.rows_of_ranks)


def test_all_replicas_are_to_finish_together():
    window = Window(10, np.array([320, 320]), np.array([1000, 3000]))
    made, saves = search(2).wanted([1, 1], window)
    assert np.allclose(np.array(made) / sum(made), [0.75, 0.25], atol=1e-4)
    assert saves == pytest.approx(0.5)


def test_a_change_that_no_row_follows_saves_nothing():
    window = Window(10, np.array([20, 20]), np.array([1000, 1200]))  # 2 rows each: 3 and 1 is worse
    assert search(2).wanted([1, 1], window)[1] <= 0.05


def test_nothing_is_decided_by_steps_that_were_not_measured():
    window = Window(10, np.array([20, 0]), np.array([1000, 1]))
    assert search(2).wanted([1, 1], window) == ([1, 1], 0.0)


class Held:
    """Process that may run for a part of each tenth of a second only, as the kernel's quotas do."""

    PERIOD = 0.1

    def __init__(self, quota):
        self.quota, self.period, self.ran = quota * self.PERIOD, 0, 0.0

    def seconds(self, processor, begin):
        """Return how long the process takes for so many processor seconds."""
        now, left = begin, processor
        while left > 1e-9:
            period = int(now / self.PERIOD + 1e-6)
            if period > self.period:
                self.period, self.ran = period, 0.0
            end = (period + 1) * self.PERIOD
            runs = max(0.0, min(left, self.quota - self.ran, end - now))
            left, self.ran, now = left - runs, self.ran + runs, now + runs
            if left > 1e-9:
                now = end
        return now - begin


@pytest.mark.parametrize("ms", [2, 3, 5, 10])
@pytest.mark.parametrize("quotas", [[0.5, 1.0], [0.225, 0.45, 0.45, 0.45], [0.25, 1.0]])
def test_processes_that_are_stopped_in_each_period_find_shares_and_keep_them(quotas, ms):
    """The times of these processes jump, and shares in proportion to speeds jumped for ever."""
    ranks, rows, steps = len(quotas), 32 * len(quotas), 1500
    shares, weights = search(ranks), [1] * ranks
    held, times, changes = [Held(quota) for quota in quotas], [], 0
    while len(times) < steps:
        own, busy, length = shares.rows_of(np.array(weights), rows), np.zeros(ranks), shares.length
        for _ in range(length):
            computed = own * ms / 1e3
            took = [one.seconds(c, sum(times)) for one, c in zip(held, computed, strict=True)]
            busy += took
            times.append(max(took) + 0.003)
        if found := shares.decide(Window(length, own * length, 1e6 * busy), weights):
            weights, changes = found.weights, changes + 1
    reached = rows * ms / 1e3 / sum(quotas) / np.mean(times[steps // 3 :])
    assert changes < 20 and reached > 0.8, (changes, reached, weights)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "case",
    [
        *("follows", "follows_in_a_loop", "follows_in_a_sharded_loop"),
        *("restarts_late", "says", "names"),
        *(pytest.param(case, marks=pytest.mark.full) for case in ("follows_late", "restarts")),
    ],
)
def test_measured_shares(case):
    for record in take("shares.py", "scale", "2x1", [case])[case]:
        assert "error" not in record, record["error"]
