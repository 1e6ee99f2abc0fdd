"""Gradients of tables, of which some rows are sent, travel on their wires."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.compression.methods import Trial
from tfscale import ScaleStrategy
from tfscale.compression import PowerSGD, TopK, Wire

TABLE, WIDTH = 50, 32


class Rows(Trial):
    """One table; each replica gives rows of it, some twice."""

    def __init__(self, method, replicas=2, **how):
        super().__init__(method, [(TABLE, WIDTH)], replicas, **how)

    def dense(self, rows):
        """The sum of one step as a whole table, the same bits on all replicas."""
        values, places = zip(*rows)
        found = self.strategy.experimental_local_results(self._rows(values, places))
        for other in found[1:]:
            np.testing.assert_array_equal(found[0].numpy(), other.numpy())
        return found[0].numpy()

    @tf.function(reduce_retracing=True)
    def _rows(self, values, places):
        def part():
            me = tf.distribute.get_replica_context().replica_id_in_sync_group
            branches = [
                lambda v=v, p=p: (tf.convert_to_tensor(v), tf.convert_to_tensor(p))
                for v, p in zip(values, places)
            ]
            own = tf.IndexedSlices(*tf.switch_case(me, branches), [TABLE, WIDTH])
            reducer = self.strategy.reducer
            reducer.prepare(self.state, self.optimizer, self.variables, [own])
            (total,) = reducer.reduce([own], self.variables, self.optimizer, self.state)
            return tf.convert_to_tensor(total)

        return self.strategy.run(part)


def rows(seed, counts=(3, 5)):
    """Return values and places of rows for each replica; some places come twice."""
    random = np.random.default_rng(seed)
    return [
        (
            random.standard_normal((count, WIDTH)).astype("float32"),
            random.integers(0, TABLE // 2, count).astype("int32"),
        )
        for count in counts
    ]


def exact(given):
    total = np.zeros((TABLE, WIDTH))
    for values, places in given:
        np.add.at(total, places, values.astype(float))
    return total


@pytest.mark.one_in(4)
@pytest.mark.parametrize("counts", [(3, 5), (0, 4), (120, 130)], ids=["few", "none", "dense"])
@pytest.mark.parametrize(
    "method, close",
    [(Wire(), 1e-6), (Wire("bf16"), 2**-7), (Wire("int8"), 2**-6), (TopK(wire="bf16"), 2**-7)],
    ids=str,
)
def test_sums_are_as_close_as_the_wire(method, close, counts):
    table = Rows(method)
    given = rows(1, counts)
    wanted = exact(given)
    found = table.dense(given)
    scale = sum(np.abs(exact([one])).max() for one in given)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=close * scale)
    assert (np.abs(found - wanted).max() > 1e-5) == (method != Wire())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("counts", [(3, 5), (0, 4), (120, 130)], ids=["few", "none", "dense"])
@pytest.mark.parametrize(
    "method", [Wire("int4"), Wire("sign"), Wire("ternary"), PowerSGD(1, factors="int8")], ids=str
)
def test_nothing_is_lost_only_late(method, counts):
    table = Rows(method)
    summed, wanted = 0.0, 0.0
    for step in range(6):
        given = rows(step, counts)
        summed = summed + table.dense(given)
        wanted = wanted + exact(given)
    (rest,) = table.kept("residual")
    assert np.abs(rest).max() > 0
    np.testing.assert_allclose(summed + rest.sum(0), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_rows_of_other_types_than_the_residual(dtype):
    table = Rows(Wire("int8", feedback=True))
    given = [(values.astype(dtype), places) for values, places in rows(1)]
    total = table.dense(given)
    assert total.dtype == dtype
    (rest,) = table.kept("residual")
    np.testing.assert_allclose(total + rest.sum(0), exact(given), rtol=0, atol=2e-3)


def test_what_is_not_finite_arrives_and_leaves_no_trace():
    table = Rows(Wire("int4"))
    table.dense(rows(1))
    (before,) = table.kept("residual")
    spoilt = rows(2)
    spoilt[1][0][2, 3] = np.nan
    assert np.isnan(table.dense(spoilt)).any()
    np.testing.assert_array_equal(table.kept("residual")[0], before)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("devices, accumulate", [(1, None), (2, None), (2, 2)])
def test_a_model_with_a_table_learns(devices, accumulate):
    """Train a model as in keras.io's text classification: words, their mean, a class."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(1).integers(1, 200, (256, 12))
    y = (x.mean(1) > 100).astype("float32")
    names = [f"CPU:{i}" for i in range(devices)]
    method = {"embed": Wire("int4"), "kernel": PowerSGD(2)}
    with ScaleStrategy("ring", None, names, method=method).scope():
        model = keras.Sequential([
            keras.Input([12], dtype="int32"),
            layers.Embedding(200, 16, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, "relu"),
            layers.Dense(1, "sigmoid"),
        ])  # fmt: skip
        optimizer = keras.optimizers.Adam(0.02, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=30, epochs=12, verbose=0)  # the last batch has 16
    assert history.history["accuracy"][-1] > 0.9
