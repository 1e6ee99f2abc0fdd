"""The layer of experts on one device, beside a loop over tokens in numpy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.parallel import Experts
from tfscale.parallel.dispatch import Dispatch

pytestmark = pytest.mark.skipif(KERAS_2, reason="Experts needs Keras 3")


def probabilities(layer, tokens):
    z = np.exp(tokens.astype("f8") @ layer.router.numpy().astype("f8"))
    return z / z.sum(-1, keepdims=True)


def looped(layer, x, mask=None):
    """Return the output, token by token and expert by expert."""
    up, up_bias, down, down_bias = (getattr(layer, n).numpy().astype("f8") for n in layer.NAMES)
    tokens = x.reshape(-1, x.shape[-1]).astype("f8")
    y = np.zeros_like(tokens)
    for t, p in enumerate(probabilities(layer, tokens)):
        if mask is not None and not mask.reshape(-1)[t]:
            continue
        best = np.argsort(-p)[: layer.k]
        whole = p[best].sum() if layer.k > 1 else 1
        for e in best:
            hidden = np.tanh(tokens[t] @ up[e] + up_bias[e])
            y[t] += p[e] / whole * (hidden @ down[e] + down_bias[e])
    return y.reshape(x.shape)


def built(*sizes, shape=(1, 6), **more):
    layer = Experts(*sizes, activation="tanh", **more)
    layer.build(shape)
    layer.up_bias.assign(np.random.default_rng(1).standard_normal(layer.up_bias.shape))
    layer.down_bias.assign(np.random.default_rng(2).standard_normal(layer.down_bias.shape))
    return layer


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("f4")


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (2, 2, 3, 2, 6), (1, 6), (0, 6)])
def test_it_computes_what_a_loop_computes(k, shape):
    layer, x = built(4, 12, k), draw(*shape)
    np.testing.assert_allclose(layer(x), looped(layer, x), atol=1e-6)


def test_masked_tokens_get_zeros_and_count_nowhere():
    layer, x = built(4, 12, balance=1.0), draw(3, 5, 6)
    mask = np.random.default_rng(3).random((3, 5)) < 0.5
    y = layer(x, mask=mask)
    np.testing.assert_allclose(y, looped(layer, x, mask), atol=1e-6)
    (loss,) = layer.losses
    layer(x[mask])
    np.testing.assert_allclose(loss, layer.losses[0], rtol=1e-6)
    layer(x, mask=mask[:, 0])  # of rows
    np.testing.assert_allclose(layer(x, mask=mask[:, 0])[~mask[:, 0]], 0)


def test_balance_is_a_loss():
    layer, x = built(4, 12, 2, balance=0.5), draw(50, 6)
    layer(x)
    p = probabilities(layer, x)
    chosen = np.argsort(-p, -1)[:, :2]
    shares = np.bincount(chosen.reshape(-1), minlength=4) / 100
    np.testing.assert_allclose(layer.losses, [0.5 * 4 * shares @ p.mean(0)], rtol=1e-6)
    layer = built(4, 12, balance=0)
    layer(x)
    assert layer.losses == []


def test_gradients_are_right():
    keras.config.set_floatx("float64")
    try:
        layer, x = built(4, 5, 2, dtype="float64", balance=0.3), tf.constant(draw(9, 6), tf.float64)

        def loss(x):
            return tf.reduce_sum(tf.square(layer(x))) + layer.losses[0]

        weights = [v.value for v in layer.trainable_weights]
        with tf.GradientTape() as tape:
            tape.watch(x)
            now = loss(x)
        found = tape.gradient(now, [x, *weights])
        rng = np.random.default_rng(4)
        for variable, gradient in zip([None, *weights], found, strict=True):
            way = 1e-6 * rng.standard_normal(gradient.shape)
            ends = []
            for sign in (1, -1):
                if variable is not None:
                    variable.assign_add(sign * way)
                ends.append(loss(x if variable is not None else x + sign * way))
                if variable is not None:
                    variable.assign_sub(sign * way)
            np.testing.assert_allclose(
                np.sum(gradient * way), (ends[0] - ends[1]) / 2, rtol=1e-6, atol=1e-14
            )
    finally:
        keras.config.set_floatx("float32")


def test_experts_begin_with_different_values_of_the_right_scale():
    layer = Experts(64, 100, kernel_initializer=keras.initializers.GlorotNormal(seed=7))
    layer.build((None, 50))
    assert abs(np.std(layer.up) - np.sqrt(2 / 150)) < 0.01 * np.sqrt(2 / 150)
    assert len(np.unique(np.array(layer.up)[:, 0, 0])) == 64
    again = Experts(64, 100, kernel_initializer=keras.initializers.GlorotNormal(seed=7))
    again.build((None, 50))
    np.testing.assert_array_equal(layer.up, again.up)


# ----------------------------------------------------------------------- capacity


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("experts", "capacity", "share"), [(8, 1.0, 0.0330), (64, 1.0, 0.0984), (64, 1.25, 0.0224)]
)
def test_random_routing_drops_the_expected_share(experts, capacity, share):
    """The router is the identity, and tokens are random: each expert is equally likely."""
    layer = Experts(experts, 1, k=1, capacity=capacity, router_initializer="identity")
    layer.build((None, experts))
    rng, shares = np.random.default_rng(5), []
    run = tf.function(lambda x: layer(x, training=True))
    for _ in range(200):
        layer.dropped.reset_state()
        run(tf.constant(rng.standard_normal((1024, experts)), tf.float32))
        shares.append(float(layer.dropped.result()))
    rounding = 0.00005  # of the expected share, which has four digits
    assert abs(np.mean(shares) - share) < 3 * np.std(shares) / np.sqrt(200) + rounding


def test_first_choices_go_before_second_ones_and_then_by_place():
    layer = Experts(3, 1, k=2, capacity=1.0, router_initializer="identity")
    layer.build((None, 3))
    layer.up.assign(np.ones((3, 3, 1)))
    x = np.array([[1, 2, 0], [1, 2, 0], [2, 1, 0], [1, 2, 0], [0, 1, 2], [2, 1, 0]], "f4")
    # Expert 1 takes 4 of 6: the first choices of tokens 0, 1 and 3, and the second one of token 2.
    seen = []
    layer.routed(x, None, True, lambda rows, counts: seen.append(counts) or rows)
    np.testing.assert_array_equal(seen[0], [4, 4, 1])
    assert float(layer.dropped.result()) == pytest.approx(3 / 12)
    seen.clear()
    layer.routed(x, None, False, lambda rows, counts: seen.append(counts) or rows)
    assert int(tf.reduce_sum(seen[0])) == 12, "outside of training nothing is dropped"


def test_a_metric_tells_what_is_dropped():
    model = keras.Sequential([keras.Input((6,)), Experts(4, 5, capacity=0.5, name="ffn")])
    model.compile("sgd", "mse")
    x = draw(32, 6)
    logs = model.fit(x, x, 16, verbose=0, validation_data=(x, x)).history
    assert 0.4 < logs["ffn_dropped"][0] < 0.9
    assert logs["val_ffn_dropped"] == [0]


# -------------------------------------------------------------------------- Keras


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_precisions(policy):
    layer = Experts(4, 8, dtype=policy)
    y = layer(draw(10, 6))
    assert y.dtype == layer.compute_dtype
    assert layer.losses[0].dtype == ("float64" if policy == "float64" else "float32")


def test_files_and_configurations(tmp_path):
    inputs = keras.Input((None, 6))
    layer = Experts(
        4, 12, 1, activation="relu", capacity=1.5, balance=0.2, use_bias=False,
        kernel_initializer="he_normal", kernel_regularizer="l2", name="ffn",
    )  # fmt: skip
    model = keras.Model(inputs, layer(inputs))
    model.compile("adam", "mse")
    x = draw(8, 3, 6)
    model.fit(x, x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert loaded.get_layer("ffn").get_config() == layer.get_config()
    in_order = {"shuffle": False, "verbose": 0}  # another order of rows rounds otherwise
    assert loaded.fit(x, x, **in_order).history == model.fit(x, x, **in_order).history
    assert keras.models.clone_model(model).count_params() == model.count_params()


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match="k is a whole number up to experts=4"):
        Experts(4, 12, k=5)
    with pytest.raises(ValueError, match=r"its shape is \(3, None\)"):
        Experts(4, 12, name="ffn").build((3, None))


# ------------------------------------------------------------------------ dispatch


def test_rows_go_to_their_experts_and_back():
    assigned = np.array([2, 0, 3, 0, 1, 2], "i4")  # two choices of three tokens; 3 is nobody
    dispatch = Dispatch.of(tf.constant(assigned), 3, choices=2, lacks_some=True)
    tokens = np.array([[0.0], [1], [2]], "f4")
    np.testing.assert_array_equal(dispatch.counts, [2, 1, 2])
    rows = dispatch.rows(tf.constant(tokens))
    np.testing.assert_array_equal(rows[:, 0], [1, 0, 1, 0, 2])
    np.testing.assert_array_equal(dispatch.results(rows)[..., 0], [[0, 1, 0], [0, 1, 2]])
    np.testing.assert_array_equal(dispatch.ranks_of_assignments, [0, 0, 0, 1, 0, 1])
