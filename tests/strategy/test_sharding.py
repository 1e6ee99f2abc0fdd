"""``shard="optimizer"``: the numbers and the files of one device, in parts.

The cases of the table, which other tests train on copies, train here on parts; so do optimizers
and options of Keras that the table does not have.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import optimizers

import tfscale
from tests.strategy.cases import BY_NAME
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, take, trained_once
from tfscale.optimizers import LAMB, LARS, AdaHessian
from tfscale.strategy.placed import Placed

pytestmark = pytest.mark.timeout(2 * SECONDS + 60)

# ------------------------------------------------------------------- the table's cases

QUICK = {
    "1x2": (
        *("adamw", "lamb_of_tfscale", "clipnorm_adam", "global_clipnorm", "accumulate_and_clip"),
        *("ema_overwrite", "float16_overflow", "constraint", "embedding_adam", "two_optimizers"),
        *("own_step_builds_a_layer_and_accumulates", "run_eagerly_clipped", "own_step_decays"),
    ),
    "2x1": ("adam", "adahessian_accumulate", "last_batch_of_1", "sparse_input_adam"),
}


def pairs():
    for layout in ("1x2", "1x4", "2x1", "2x2"):
        for name, case in BY_NAME.items():
            if layout in case.layouts:
                quick = name in QUICK.get(layout, ())
                yield pytest.param(layout, name, marks=[] if quick else pytest.mark.full)


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, ("1x2", "1x4", "2x1", "2x2"))


@pytest.mark.one_in(17)
@pytest.mark.parametrize(("layout", "case"), list(pairs()))
def test_parts_train_as_one_device(trained, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained("sharded", layout)[case],
        lambda: take("exact.py", "sharded", layout, [case])[case],
    )


# ----------------------------------------------------------------- optimizers, options


class OfAUser(keras.optimizers.Optimizer):
    """Normalizes gradients; one list of slots does not say of which weights they are."""

    def __init__(self, learning_rate=0.05, **more):
        super().__init__(learning_rate=learning_rate, **more)

    def build(self, variables):
        super().build(variables)
        self.momentums = [self.add_variable(shape=v.shape, name="m") for v in variables]
        self.sizes = self.add_optimizer_variables(variables, "size", initializer="ones")

    def update_step(self, gradient, variable, learning_rate):
        place = self._get_variable_index(variable)
        momentum, size = self.momentums[place], self.sizes[place]
        gradient = tf.convert_to_tensor(gradient)
        momentum.assign(0.9 * momentum + gradient / (tf.norm(gradient) + 0.01))
        size.assign(0.9 * size + 0.1 * tf.abs(variable))
        variable.assign(variable - learning_rate * momentum * (1 + size))


def excluding():
    optimizer = optimizers.AdamW(0.003, weight_decay=0.3, epsilon=EPSILON)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# Far from where Adam amplifies the rounding of gradients near zero.
EPSILON = 1e-2
Adam = functools.partial(optimizers.Adam, 0.01, epsilon=EPSILON)

MADE = {
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "adam, averages taken in a window": lambda: Adam(
        clipnorm=0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=2
    ),
    "adamw, exclusions": excluding,
    "lars": lambda: LARS(0.1, momentum=0.9, global_clipnorm=0.5),
    "muon": lambda: optimizers.Muon(0.01),
    "nadam, clipvalue": lambda: optimizers.Nadam(0.01, clipvalue=0.01, epsilon=EPSILON),
    "of a user": OfAUser,
    "scaled": lambda: optimizers.LossScaleOptimizer(
        LAMB(0.01, gradient_accumulation_steps=2), initial_scale=2.0**40
    ),
    "several": lambda: optimizers.MultiOptimizer(
        optimizers.OptimizerMap(Adam(), {".*bias": optimizers.SGD(0.1)})
    ),
}


def data(rows=50):
    draw = np.random.default_rng(0)
    return draw.integers(0, 11, (rows, 5)), draw.integers(0, 3, rows)


def made(strategy, make, **compiled):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        words = keras.Input((5,), dtype="int32")
        x = keras.layers.Flatten()(keras.layers.Embedding(11, 6)(words))
        limit = keras.constraints.MaxNorm(1.0)
        x = keras.layers.Dense(13, activation="tanh", kernel_constraint=limit)(x)
        model = keras.Model(words, keras.layers.Dense(3)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(make(), loss, **compiled)
    return model


def built(strategy, make):
    model = made(strategy, make)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    return model


def fit(model, epochs=2, callbacks=()):
    model.fit(*data(), 20, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def assert_near(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)


def sharded(devices=2, **settings):
    names = [f"CPU:{place}" for place in range(devices)]
    return tfscale.ScaleStrategy("ring", devices=names, shard="optimizer", **settings)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", MADE)
def test_optimizers_update_parts_as_one_device(name):
    if name == "several" and not hasattr(optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    eager = {"run_eagerly": name == "adam, averages taken in a window"}
    expected, found = made(None, MADE[name], **eager), made(sharded(), MADE[name], **eager)
    for model in (expected, found):
        fit(model)
    # Muon's kernel orthogonalizes: rounding grows.
    assert_near(numbers(found), numbers(expected), 1e-5 if name == "muon" else 1e-6)


class Unused(keras.Model):
    """The second layer has no gradient, and a replica that holds only this layer has none."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = keras.layers.Dense(1), keras.layers.Dense(40)

    def call(self, x):
        self.unused(x)
        return self.used(x)


@pytest.mark.slow
def test_a_replica_that_gets_no_gradient_counts_steps():
    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = Unused()
            model.compile(LAMB(0.1), "mse")
        x = np.random.default_rng(0).standard_normal((24, 3)).astype("f4")
        model.fit(x, x[:, :1], 8, verbose=0, shuffle=False)
        return numbers(model)

    assert_near(trained(sharded(4)), trained(None))


def test_a_replica_without_weights_calls_no_update():
    """Muon's update needs a matrix, and there is one weight for two replicas."""

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layer = keras.layers.Dense(3, use_bias=False)
            model = keras.Sequential([keras.Input((4,)), layer])
            model.compile(optimizers.Muon(0.01), "mse")
        x = np.random.default_rng(0).standard_normal((24, 4)).astype("f4")
        model.fit(x, x[:, :3], 8, verbose=0, shuffle=False)
        return numbers(model)

    assert_near(trained(sharded(2)), trained(None), 1e-5)


def test_a_norm_that_overflows_clips_to_nothing():
    """The square of the norm is too large for float32, as in Keras; no weight becomes NaN."""

    def trained(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
            model.compile(optimizers.SGD(0.01, clipnorm=1.0), "mse")
        x = np.full((8, 4), 1e13, "f4")
        model.fit(x, x[:, :3], 8, verbose=0)
        return numbers(model)

    expected = trained(None)
    assert all(np.isfinite(each).all() for each in expected)
    assert_near(trained(sharded(2)), expected)


@pytest.mark.slow
def test_averages_are_swapped_in_and_out():
    def trained(strategy):
        model = made(strategy, lambda: Adam(use_ema=True, ema_momentum=0.9))
        fit(model, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
        return numbers(model)

    assert_near(trained(sharded(3)), trained(None))


@pytest.mark.slow
def test_a_lossy_wire_keeps_what_it_loses():
    """Parts of what a rank lost are kept, so that sums over steps are those of lossless wires."""
    policy = tfscale.compression.MethodPolicy(tfscale.compression.Wire("int4", True), small=0)
    draw = np.random.default_rng(1)
    x = draw.standard_normal((64, 8)).astype("f4")

    def weights(**settings):
        keras.utils.set_random_seed(1)
        with sharded(**settings).scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
            model.compile(optimizers.SGD(0.01), "mse")
        model.fit(x, x, 16, 20, shuffle=False, verbose=0)
        return model.get_weights()[0]

    exact, lossy = weights(), weights(method=policy)
    assert 0 < np.max(np.abs(exact - lossy)) < 0.01


# ------------------------------------------------------------------------------- files


@pytest.mark.slow
@pytest.mark.parametrize(  # Keras saves no exclusions
    "name", ["adafactor", pytest.param("nadam, clipvalue", marks=pytest.mark.full)]
)
def test_files_are_those_of_one_device(tmp_path, name):
    path = tmp_path / "model.keras"
    model = made(sharded(3), MADE[name])
    fit(model)
    model.save(path)
    saved = numbers(model)
    fit(model)
    expected = numbers(model)
    for strategy in (None, sharded(2)):
        with strategy.scope() if strategy else contextlib.nullcontext():
            loaded = keras.models.load_model(path)
        for one, other in zip(numbers(loaded), saved, strict=True):
            np.testing.assert_array_equal(one, other)
        fit(loaded)
        assert_near(numbers(loaded), expected)


@pytest.mark.full
@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_any_number_of_replicas_reads_a_file_of_four_and_back(tmp_path, readers):
    def train(model):
        fit(model, 10)
        return numbers(model)

    def read(path, replicas):
        with sharded(replicas).scope():
            return keras.models.load_model(path)

    four = made(sharded(4), MADE["nadam, clipvalue"])
    train(four)
    four.save(tmp_path / "of_four.keras")
    saved = numbers(four)
    reader = read(tmp_path / "of_four.keras", readers)
    reader.save(tmp_path / "back.keras")
    back = read(tmp_path / "back.keras", 4)
    for model in (reader, back):
        for one, other in zip(numbers(model), saved, strict=True):
            np.testing.assert_array_equal(one, other)
    expected = train(four)
    assert_near(train(reader), expected)
    assert_near(train(back), expected)


def test_checkpoints_of_tensorflow_hold_whole_slots(tmp_path):
    model = made(sharded(2), MADE["adamw, exclusions"])
    fit(model)
    saved = numbers(model)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "state")
    other = built(sharded(4), MADE["adamw, exclusions"])
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    for one, expected in zip(numbers(other), saved, strict=True):
        np.testing.assert_array_equal(one, expected)


class Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@pytest.mark.slow
def test_a_backup_continues_with_another_number_of_replicas(tmp_path):
    def backed_up(strategy, *others):
        model = made(strategy, MADE["adamw, exclusions"])
        fit(model, 4, [keras.callbacks.BackupAndRestore(tmp_path / "backup"), *others])
        return numbers(model)

    expected = made(None, MADE["adamw, exclusions"])
    fit(expected, 4)
    with pytest.raises(InterruptedError):
        backed_up(sharded(3), Stop())
    assert_near(backed_up(sharded(2)), numbers(expected))


# ------------------------------------------------------------------- who holds what


@pytest.mark.parametrize("name", ["adamw, exclusions", "adafactor", "of a user"])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_hold_what_the_table_says(name, replicas):
    strategy = sharded(replicas)
    model = built(strategy, MADE[name])
    table = strategy.layouts()
    assert [row.path for row in table] == [v.path for v in model.trainable_variables]
    slots = model.optimizer.variables[2:]  # the first two count steps and hold the rate
    for rank in range(replicas):
        copies = [v.value.values[rank] for v in (*model.trainable_variables, *slots)]
        held, room = table.numbers(rank), sum(v.shape.num_elements() for v in copies)
        assert room - replicas * len(slots) <= held <= room  # parts of equal sizes may have padding
    assert any(isinstance(v.value, Placed) for v in slots)
    assert f"rank {replicas - 1}" in str(table) and type(model.optimizer).__name__ in str(table)


def test_copies_have_a_table_too():
    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"])
    model = built(strategy, Adam)
    size = model.count_params()
    assert [strategy.layouts().numbers(rank) for rank in (0, 1)] == [3 * size] * 2


def test_the_exchanges_are_halves_of_an_all_reduce():
    strategy = sharded(2)
    fit(made(strategy, lambda: optimizers.SGD(0.1)), 1)
    rows = {row.bucket.label.split(" ")[0]: row for row in strategy.explain() if row.bytes}
    assert set(rows) == {"gradients", "weights"}
    assert "each replica gets the sums of its parts" in rows["gradients"].why


# ---------------------------------------------------------------------------- refusals


class SeesAll(optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        return super().apply(grads, trainable_variables)


class Scaler(optimizers.LossScaleOptimizer):
    def apply(self, grads, trainable_variables=None):
        return super().apply(grads, trainable_variables)


class Counting(optimizers.SGD):
    """A number that all weights share grows with each update."""

    def build(self, variables):
        super().build(variables)
        self.distance = self.add_variable(shape=(), name="distance")

    def update_step(self, gradient, variable, learning_rate):
        self.distance.assign_add(tf.norm(tf.convert_to_tensor(gradient)))
        super().update_step(gradient, variable, learning_rate)


class Unlisted(optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.extra = {v.path: self.add_variable(shape=v.shape, name="e") for v in variables}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (SeesAll, r"'SeesAll' has its own apply\(\)"),
        (lambda rate: Scaler(optimizers.SGD(rate)), r"'Scaler' has its own apply\(\)"),
        (Counting, r"update_step\(\) assigns '.*distance', which is neither the weight nor"),
        (Unlisted, r"cannot tell to which weights these variables of 'Unlisted' belong"),
    ],
)
def test_an_optimizer_that_cannot_be_shared_out_is_refused(make, said):
    model = made(sharded(), lambda: make(0.1))
    with pytest.raises(ValueError, match=said):
        fit(model)


def test_it_is_refused_again_once_keras_has_taken_it_for_built():
    model = made(sharded(), lambda: Unlisted(0.1))
    for _ in range(2):
        with pytest.raises(ValueError, match="'Unlisted' belong"):
            fit(model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "tree"}, "algorithm='tree' cannot"),
        ({"sync": tfscale.sync.LocalSGD(every=4)}, "trains with its own state"),
        ({"method": tfscale.compression.PowerSGD(rank=2)}, "computes whole sums"),
        ({"shard": "both"}, "shard is 'optimizer' or 'all'; got 'both'"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, said):
    devices = ["CPU:0", "CPU:1"]
    with pytest.raises(ValueError, match=said):
        tfscale.ScaleStrategy(**{"shard": "optimizer", "devices": devices, **settings})


@pytest.mark.slow
def test_adahessian_measures_on_parts():
    def trained(strategy):
        model = made(strategy, lambda: AdaHessian(0.05, epsilon=0.1))
        fit(model, 1)
        return numbers(model)

    assert_near(trained(sharded(3)), trained(None))
