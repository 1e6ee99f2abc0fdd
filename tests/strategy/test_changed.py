"""Steps that change gradients before an optimizer gets them train as on one device."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale.compression import PowerSGD, TopK, Wire
from tfscale.optimizers import AdaHessian

layers = keras.layers


class Model(keras.Model):
    """Two layers, each with an optimizer of its own; a step applies ``updates`` in order."""

    def __init__(self, step):
        super().__init__()
        self.first, self.second = layers.Dense(8, "relu"), layers.Dense(5)
        self.step = step
        self.decay = self.add_weight(initializer=lambda shape, dtype: 0.3, trainable=False)

    def call(self, x):
        return self.second(self.first(x))

    def compile(self, *optimizers):
        super().compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        self.optimizers = optimizers

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(data)
        self.step(self, data, tape, loss)
        return {"loss": loss}

    def loss_of(self, data):
        x, y = data
        return self.compute_loss(x=x, y=y, y_pred=self(x, training=True))

    def descend(self, which, gradients):
        weights = (self.first, self.second)[which].trainable_weights
        self.optimizers[which].apply(gradients, weights)


def weights_of(model):
    return [*model.first.trainable_weights, *model.second.trainable_weights]


def clip_both(model, data, tape, loss):
    clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, weights_of(model)), 0.05)
    model.descend(0, clipped[:2])
    model.descend(1, clipped[2:])


def first_as_it_is(model, data, tape, loss):
    gradients = tape.gradient(loss, weights_of(model))
    model.descend(0, gradients[:2])
    model.descend(1, [g / (1 + tf.linalg.global_norm(gradients)) for g in gradients[2:]])


def first_as_it_is_but_last(model, data, tape, loss):
    gradients = tape.gradient(loss, weights_of(model))
    model.descend(1, [g / (1 + tf.linalg.global_norm(gradients)) for g in gradients[2:]])
    model.descend(0, gradients[:2])


def clips_kernels(model, data, tape, loss):
    """An optimizer gets changed gradients beside others."""
    for which, layer in enumerate([model.first, model.second]):
        kernel, bias = tape.gradient(loss, layer.trainable_weights)
        model.descend(which, [tf.clip_by_norm(kernel, 0.05), bias])


def kernels_decay_by_a_variable(model, data, tape, loss):
    """The changed ones may differ between replicas; the others are sums as they are."""
    for which, layer in enumerate([model.first, model.second]):
        kernel, bias = tape.gradient(loss, layer.trainable_weights)
        model.descend(which, [kernel + model.decay * layer.kernel, bias])


def again_where_gradients_lead(model, data, tape, loss):
    """The second tape differentiates what the step has computed from gradients of the first."""
    every = weights_of(model)
    gradients = tape.gradient(loss, every)
    x, y = data
    with tf.GradientTape() as second:
        moved = x * tf.stop_gradient(1 + tf.linalg.global_norm(gradients))
        loss = model.loss_of((moved, y))
    both = zip(gradients, second.gradient(loss, every), strict=True)
    clipped, _ = tf.clip_by_global_norm([g + h for g, h in both], 0.1)
    model.descend(0, clipped[:2])
    model.descend(1, clipped[2:])


def adds_losses_of_two_kinds(model, data, tape, loss):
    """One tape has differentiated a loss of Keras's, which is scaled, and the other a mean."""
    x, _ = data
    every = weights_of(model)
    with tf.GradientTape() as second:
        mean = tf.reduce_mean(tf.square(model(x)))
    both = zip(tape.gradient(loss, every), second.gradient(mean, every), strict=True)
    added = [g + 0.5 * h for g, h in both]
    model.descend(0, added[:2])
    model.descend(1, added[2:])


def in_a_function(model, data, tape, loss):
    @tf.function
    def gradients(x, y):
        with tf.GradientTape() as inner:
            found = model.loss_of((x, y))
        return inner.gradient(found, weights_of(model))

    clipped, _ = tf.clip_by_global_norm(gradients(*data), 0.05)
    model.descend(0, clipped[:2])
    model.descend(1, clipped[2:])


def trained(
    step,
    strategy=None,
    optimizer=lambda: keras.optimizers.SGD(0.1),
    kind=Model,
    returns_norms=False,
):
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((50, 12)).astype("f4"), draw.integers(0, 5, 50)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = kind(step)
        model(x[:2])
        model.compile(optimizer(), keras.optimizers.Adam(0.01))
    history = model.fit(x, y, 16, 2, shuffle=False, verbose=0).history
    return history["norm"] if returns_norms else model.get_weights()


def replicas(number=2, **settings):
    return tfscale.ScaleStrategy(
        "ring", devices=[f"CPU:{i}" for i in range(number)], deadline=60, **settings
    )


STEPS = [
    *(clip_both, first_as_it_is, first_as_it_is_but_last, again_where_gradients_lead),
    *(adds_losses_of_two_kinds, in_a_function, clips_kernels, kernels_decay_by_a_variable),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("step", "shard"),
    [
        *((step, None) for step in STEPS if step is not first_as_it_is),
        (first_as_it_is, "optimizer"),
        pytest.param(first_as_it_is, None, marks=pytest.mark.full),
        *(
            pytest.param(step, "optimizer", marks=pytest.mark.full)
            for step in STEPS
            if step is not first_as_it_is
        ),
    ],
)
def test_steps_that_change_gradients_train_as_one_device(step, shard):
    expected = trained(step)
    for one, other in zip(trained(step, replicas(3, shard=shard)), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_step_that_changes_gradients_beside_measured_curvature_is_named(caplog):
    trained(clip_both, replicas(), lambda: AdaHessian(0.01))
    assert "changes gradients before an optimizer gets them that measures curvature" in caplog.text


def clip_each_sample(model, data, tape, loss):
    every = weights_of(model)

    def clipped(row):
        x, y = row
        with tf.GradientTape() as inner:
            outputs = model(x[tf.newaxis], training=True)
            found = keras.losses.sparse_categorical_crossentropy(y[tf.newaxis], outputs)[0]
        return tf.clip_by_global_norm(inner.gradient(found, every), 0.05)[0]

    kinds = [tf.TensorSpec(v.shape, v.dtype) for v in every]
    means = [tf.reduce_mean(g, 0) for g in tf.map_fn(clipped, data, fn_output_signature=kinds)]
    model.descend(0, means[:2])
    model.descend(1, means[2:])


def test_gradients_of_single_rows_stay_as_they_are_or_are_refused():
    expected = trained(clip_each_sample)
    for one, other in zip(trained(clip_each_sample, replicas()), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="gradients of single rows"):
        trained(clip_each_sample, replicas(shard="all"))


class Noting(Model):
    """A model that logs the norm of its gradients, and changes nothing."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        gradients = tape.gradient(loss, weights_of(self))
        norm = tf.linalg.global_norm(gradients)
        self.descend(0, gradients[:2])
        self.descend(1, gradients[2:])
        return {"loss": loss, "norm": norm}


class NotingOwnSums(Noting):
    """A model that sums, for the norm, gradients over replicas by itself."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.loss_function(data[1], self(data[0], training=True)))
        gradients = tape.gradient(loss, weights_of(self))
        self.descend(0, gradients[:2])
        self.descend(1, gradients[2:])
        sums = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        return {"loss": loss, "norm": tf.linalg.global_norm(sums)}

    @staticmethod
    def loss_function(y, outputs):
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def test_a_step_may_sum_gradients_by_itself():
    found = trained(None, replicas(), returns_norms=True, kind=NotingOwnSums)
    expected = trained(None, returns_norms=True, kind=Noting)
    # Of two means over halves of a batch, the sum is twice the mean over the batch.
    np.testing.assert_allclose(found, 2 * np.asarray(expected), rtol=1e-5)


@pytest.mark.slow
def test_a_norm_in_the_logs_is_that_of_the_whole_batch():
    expected, found = (
        trained(None, each, returns_norms=True, kind=Noting) for each in (None, replicas(3))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ------------------------------------------------------------------------ custom loops

ROWS = 16


def slopes(model, rows):
    x, y = rows
    with tf.GradientTape() as tape:
        losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        loss = tf.reduce_sum(losses) / ROWS
    return tape.gradient(loss, model.trainable_variables)


def loop_clips(model, optimizer, data):
    clipped, _ = tf.clip_by_global_norm(slopes(model, data), 0.05)
    optimizer.apply_gradients(zip(clipped, model.trainable_variables, strict=True))


def loop_decays(model, optimizer, data):
    every = model.trainable_variables
    optimizer.apply([g + 0.1 * w for g, w in zip(slopes(model, data), every, strict=True)], every)


def loop_has_no_optimizer(model, optimizer, data):
    for weight, gradient in zip(model.trainable_variables, slopes(model, data), strict=True):
        weight.assign_sub(0.1 * gradient)


def loop_adds_microbatches(model, optimizer, data):
    parts = [slopes(model, [tensor[k::2] for tensor in data]) for k in range(2)]
    optimizer.apply([(a + b) / 2 for a, b in zip(*parts, strict=True)], model.trainable_variables)


def loop_clips_microbatches(model, optimizer, data):
    parts = [slopes(model, [tensor[k::2] for tensor in data]) for k in range(2)]
    clipped, _ = tf.clip_by_global_norm([a + b for a, b in zip(*parts, strict=True)], 0.05)
    optimizer.apply(clipped, model.trainable_variables)


def looped(step, strategy=None, passes_function=False):
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((48, 12)).astype("f4"), draw.integers(0, 5, 48)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((12,)), layers.Dense(8, "relu"), layers.Dense(5)])
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

    def of_replica(*data):
        step(model, optimizer, data)

    run = tf.function(of_replica)
    if strategy:
        batches = strategy.experimental_distribute_dataset(batches)
        of_all = run if passes_function else of_replica

        def run(*data):
            strategy.run(of_all, data)

        run = run if passes_function else tf.function(run)
    for data in batches:
        run(*data)
    return model.get_weights()


LOOPS = [loop_clips, loop_decays, loop_has_no_optimizer, loop_clips_microbatches]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("step", "shard", "passes_function"),
    [
        *((step, None, False) for step in [*LOOPS, loop_adds_microbatches]),
        (loop_clips, "all", False),
        (loop_clips, None, True),
        *(pytest.param(step, "optimizer", False, marks=pytest.mark.full) for step in LOOPS),
        *(pytest.param(step, "all", False, marks=pytest.mark.full) for step in LOOPS[1:]),
    ],
)
def test_custom_loops_that_change_gradients_train_as_one_device(step, shard, passes_function):
    expected, strategy = looped(step), replicas(2, shard=shard)
    found = looped(step, strategy, passes_function)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM"])
def test_a_loop_may_move_variables_of_tensorflow_by_hand(aggregation):
    """A variable with an aggregation makes a whole of its parts by itself."""
    found = []
    for strategy in (None, replicas()):
        with strategy.scope() if strategy else contextlib.nullcontext():
            aggregations = getattr(tf.VariableAggregation, aggregation)
            weight, last = (
                tf.Variable(tf.ones([12, 5]), aggregation=aggregations) for _ in range(2)
            )

        def step(x, y, weight=weight, last=last):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(x @ weight - y)) / ROWS
            gradient = tape.gradient(loss, weight)
            weight.assign_sub(0.1 * gradient)
            last.assign(gradient)

        def of_all(x, y, strategy=strategy, step=step):
            strategy.run(step, (x, y)) if strategy else step(x, y)

        draw = np.random.default_rng(0)
        arrays = [draw.standard_normal((48, width)).astype("f4") for width in (12, 5)]
        batches = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(ROWS)
        run = tf.function(of_all)
        for batch in strategy.experimental_distribute_dataset(batches) if strategy else batches:
            run(*batch)
        found.append([each for v in (weight, last) for each in getattr(v, "values", [v] * 2)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


def added_up(strategy, together):
    """Weights after two windows of two steps, whose gradients a loop adds up in variables."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        weight, total = (tf.Variable(tf.ones([12, 5]), trainable=t) for t in (True, False))
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])
        steps = tf.Variable(0, trainable=False)

    def add(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(x @ weight - y)) / ROWS
        total.assign_add(tape.gradient(loss, weight))
        steps.assign_add(1)

    def apply():
        optimizer.apply_gradients([(total / 2, weight)])
        total.assign(tf.zeros_like(total))

    def both(x, y):
        add(x, y)
        tf.cond(steps % 2 == 0, apply, lambda: None)

    run = strategy.run if strategy else (lambda step, args=(): step(*args))
    in_one, adding, applying = (
        tf.function(lambda *data, step=step: run(step, data)) for step in (both, add, apply)
    )
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((4 * ROWS, width)).astype("f4") for width in (12, 5)]
    batches = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(ROWS)
    for i, batch in enumerate(
        strategy.experimental_distribute_dataset(batches) if strategy else batches
    ):
        (in_one if together else adding)(*batch)
        if not together and i % 2:
            applying()
    return weight


@pytest.mark.parametrize("together", [True, False])
def test_a_loop_may_add_up_gradients_in_a_variable_and_apply_them_later(together):
    one, both = added_up(None, together), added_up(replicas(), together)
    for each in both.values:
        np.testing.assert_allclose(one, each, atol=1e-5, rtol=0)


def all_reduces_of(step):
    found = []

    def noting(*arguments):
        step(*arguments)
        operations = tf.compat.v1.get_default_graph().get_operations()
        found.append([op.type for op in operations].count("TfscaleAllReduce"))

    looped(noting, replicas(2))
    return max(found) // 2  # each replica makes one


def test_one_sum_serves_all_microbatches_that_are_only_added():
    assert all_reduces_of(loop_adds_microbatches) == 1
    assert all_reduces_of(loop_clips_microbatches) > 1


# --------------------------------------------------------- branches, windows, moves


class OfOneLayer(keras.Model):
    """A layer, trained by a step that ``step(model, x, y)`` makes."""

    def __init__(self, step):
        super().__init__()
        self.net = layers.Dense(64, use_bias=False, kernel_initializer="ones")
        self.net.build([None, 32])
        self.steps = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.step, self.built = step, True

    def call(self, x):
        return self.net(x)

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, data):
        self.steps.assign_add(1)
        self.step(self, *data)
        return {"steps": self.steps}

    def descend(self, gradients):
        self.optimizer.apply(gradients, self.trainable_variables)


def fitted(step, strategy=None, samples=64, **of_optimizer):
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((samples, width)).astype("f4") for width in (32, 64))
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = OfOneLayer(step)
        model.compile(keras.optimizers.SGD(0.1, **of_optimizer), "mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model


def kernel(model):
    return model.net.get_weights()[0]


def only_if(predicate, apply):
    tf.cond(predicate, lambda: (apply(), tf.constant(0))[1], lambda: tf.constant(0))


def every_second(model, apply):
    only_if(model.steps % 2 == 0, apply)


def all_in_a_branch(model, x, y):
    every_second(model, lambda: model.descend(model.gradients(x, y)))


def applies_in_a_branch(model, x, y):
    gradients = model.gradients(x, y)
    every_second(model, lambda: model.descend(gradients))


def applies_if_the_norm_is_small(model, x, y):
    """The norm of a replica's part is another one."""
    gradients = model.gradients(x, y)
    is_small = tf.linalg.global_norm(gradients) < 3.3  # so are four of eight
    only_if(is_small, lambda: model.descend(gradients))


def clips_in_a_branch(model, x, y):
    gradients = model.gradients(x, y)
    every_second(model, lambda: model.descend(tf.clip_by_global_norm(gradients, 0.1)[0]))


def clips_before_a_branch(model, x, y):
    clipped, _ = tf.clip_by_global_norm(model.gradients(x, y), 0.1)
    every_second(model, lambda: model.descend(clipped))


BRANCHES = [
    *(all_in_a_branch, applies_in_a_branch, applies_if_the_norm_is_small),
    *(clips_in_a_branch, clips_before_a_branch),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", BRANCHES)
@pytest.mark.parametrize(("wire", "share"), [("fp32", 1e-3), ("int4", 0.3)])
def test_a_step_may_apply_gradients_in_a_branch(step, wire, share):
    """A wire with a residual needs slots, which are made while the branch is traced."""
    expected = kernel(fitted(step))
    found = kernel(fitted(step, replicas(wire={"kernel": wire})))
    change, error = (np.linalg.norm(expected - other) for other in (1, found))
    assert 0 < error < share * change
    # A branch that is not taken drops its gradients, and what a wire leaves of them must not stay.
    is_lossy = wire == "int4" and step is all_in_a_branch
    assert is_lossy == (error > 1e-3 * change)


def test_replicas_that_choose_different_branches_fail_at_the_deadline():
    def step(model, x, y):
        gradients = model.gradients(x, y)
        is_small = tf.reduce_mean(tf.square(y - model(x))) < 33  # of a replica's own rows
        only_if(is_small, lambda: model.descend(gradients))

    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"], deadline=3)
    with pytest.raises(tf.errors.DeadlineExceededError, match="has not reached this collective"):
        fitted(step, strategy)


def keeps(make):
    """Return a step that adds up gradients in a variable, and applies the sum of two steps."""
    made = []

    def step(model, x, y):
        with tf.init_scope():
            made or made.append(make())
        (kept,), (gradient,) = made, model.gradients(x, y)
        kept.assign_add(gradient)

        def apply():
            model.descend([tf.convert_to_tensor(kept)])
            kept.assign(tf.zeros_like(gradient))

        every_second(model, apply)

    return step


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_step_may_add_up_gradients_in_a_variable_of_its_own(kind):
    steps = [keeps(lambda: kind(tf.zeros([32, 64]), trainable=False)) for _ in range(2)]
    found = [fitted(step, each) for step, each in zip(steps, (None, replicas()), strict=True)]
    np.testing.assert_allclose(*map(kernel, found), atol=1e-6, rtol=0)


def clips(model, x, y):
    model.descend(tf.clip_by_global_norm(model.gradients(x, y), 0.1)[0])


@pytest.mark.parametrize(
    ("number", "settings"),
    [(2, {}), (4, {"grid": {"tensor": 2}, "tensor": {"kernel": "columns"}})],
)
def test_a_window_of_changed_gradients_reads_as_one_device_s(number, settings):
    """Three steps of four have been made: files hold what the optimizer has accumulated."""
    one, other = (
        fitted(clips, each, samples=24, gradient_accumulation_steps=4)
        for each in (None, replicas(number, **settings))
    )
    pairs = zip(one.optimizer.variables, other.optimizer.variables, strict=True)
    kept = [(a.numpy(), b.numpy()) for a, b in pairs if "accumulator" in a.path]
    assert kept and all(np.abs(a).max() > 0 for a, _ in kept)
    for expected, found in kept:
        np.testing.assert_allclose(found, expected, atol=1e-7, rtol=1e-5)


def moves_there_and_back(model, x, y):
    """Apply gradients of 0 at the place where SAM looks for others."""
    moves = model.gradients(x, y)
    for weight, move in zip(model.trainable_variables, moves, strict=True):
        weight.assign_add(0.05 * move)
    gradients = [0.0 * g for g in model.gradients(x, y)]
    for weight, move in zip(model.trainable_variables, moves, strict=True):
        weight.assign_sub(0.05 * move)
    model.descend(gradients)


@pytest.mark.parametrize("method", [Wire("int4"), TopK(0.25), PowerSGD(1)], ids=str)
def test_a_move_leaves_nothing_in_the_residual(method):
    """An update gets the numbers that a compressed sum has not sent; a move is no update."""
    strategy = replicas(method={"kernel": method})
    np.testing.assert_allclose(kernel(fitted(moves_there_and_back, strategy)), 1, atol=1e-6)
    assert "moves" in str(strategy.explain())
