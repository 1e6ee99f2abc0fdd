"""Programs of a strategy's user without ``fit``: variables, values, state and metrics."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.keras_like.scenes import batches, copies, numbers, of_all, scenes, weights_of

ROWS, FEATURES = 8, 3


def network(dropout=0.0):
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Dense(4, activation="tanh", name="hidden"),
            layers.Dropout(dropout, seed=7),
            layers.Dense(2, name="head"),
        ]
    )


def compiled(rate=0.1):
    model = network()
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=["mae"])
    return model


def fit(model, epochs=2, rows=ROWS):
    x, y = numbers(1, rows, FEATURES), numbers(2, rows, 2)
    return model.fit(x, y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history


# ---- variables


def variables_begin_alike(strategy):
    with strategy.scope():
        built = [layers.Dense(4), layers.BatchNormalization(), layers.GRU(3), layers.Conv1D(2, 3)]
        for layer in built:
            layer.build([None, 5, FEATURES])
    return {
        f"{type(layer).__name__} {i}": of_all(strategy, weight)
        for layer in built
        for i, weight in enumerate(layer.weights)
        if "seed" not in weight.path
    }


def variables_are_assigned_from_outside(strategy):
    with strategy.scope():
        variable, dense = keras.Variable(numbers(1, 2, 2)), layers.Dense(2)
        dense.build([None, 2])
    seen = {}
    for name, value in (
        ("assign", numbers(2, 2, 2)),
        ("assign_add", numbers(3, 2, 2)),
        ("assign_sub", numbers(4, 2, 2)),
    ):
        getattr(variable, name)(value)
        seen[name] = of_all(strategy, variable)
    dense.set_weights([numbers(5, 2, 2), numbers(6, 2)])
    return seen | weights_of(strategy, dense)


def variables_are_assigned_on_replicas(strategy, aggregation, graph):
    """Replicas assign together what one device assigns: parts of a sum, or equal means."""
    with strategy.scope():
        variable = keras.Variable(numbers(1, FEATURES), aggregation=aggregation)

    def step(rows):
        parts = {"sum": tf.reduce_sum(rows, 0), "mean": tf.reduce_mean(rows, 0)}
        given = parts.get(aggregation, tf.range(FEATURES, dtype=tf.float32))
        variable.assign(given) if aggregation == "sum" else variable.assign_add(given)

    run = tf.function(step) if graph else step
    for rows in batches(strategy, numbers(2, ROWS, FEATURES), size=4):
        strategy.run(run, args=(rows[0],))
    return {"variable": of_all(strategy, variable)}


def each_replica_counts(strategy, graph):
    """Variables that are read as the sum of what replicas have, as metrics keep theirs."""
    with strategy.scope():
        count = keras.Variable(
            np.float32(0), trainable=False, synchronization="on_read", aggregation="sum"
        )

    def step(rows):
        count.assign_add(tf.reduce_sum(rows))
        count.assign(count * 2.0)

    run, seen = tf.function(step) if graph else step, []
    for rows in batches(strategy, numbers(2, 11, FEATURES), size=4):
        strategy.run(run, args=(rows[0],))
        seen.append(count.numpy())
    count.assign(3.0)
    return {"counted": seen, "assigned": count.numpy()}


class Calls(layers.Layer):
    """Counts what it is called with, in a whole number and in one of its own."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.level = self.add_weight(
            shape=shape[1:], initializer="zeros", trainable=False, name="level"
        )

    def call(self, inputs):
        self.calls.assign_add(1)
        self.level.assign(0.5 * self.level + 0.5 * keras.ops.mean(inputs, 0))
        return inputs + self.level


def layers_keep_state(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input([FEATURES]), Calls(), layers.Dense(2)])
        model.compile("sgd", "mse")
    before = model.layers[0].calls.numpy()
    fit(model)
    return {
        "calls": model.layers[0].calls.numpy() - before,
        "level": of_all(strategy, model.layers[0].level),
    }


def models_are_cloned(strategy):
    with strategy.scope():
        model = compiled()
        clone = keras.models.clone_model(model)
        clone.set_weights(model.get_weights())
        clone.compile("sgd", "mse")
    seen = fit(clone)
    return seen | weights_of(strategy, model, "model") | weights_of(strategy, clone, "clone")


# ---- values


def models_run_on_replicas(strategy, graph):
    with strategy.scope():
        model = network()
    run, seen = tf.function(model) if graph else model, []
    for rows in batches(strategy, numbers(1, ROWS, FEATURES), size=4):
        seen.append(strategy.gather(strategy.run(run, args=(rows[0],)), axis=0))
    return {"outputs": seen}


def values_are_reduced(strategy):
    seen = {}

    def step(rows):
        return {"rows": rows, "pair": [tf.reduce_mean(rows), tf.reduce_sum(rows)]}

    for rows in batches(strategy, numbers(1, ROWS, FEATURES), size=ROWS):
        found = strategy.run(tf.function(step), args=(rows[0],))
        seen["sum of rows"] = strategy.reduce("SUM", found["rows"], axis=0)
        seen["mean of rows"] = strategy.reduce("MEAN", found["rows"], axis=0)
        seen["mean"] = strategy.reduce("MEAN", found["pair"][0], axis=None)
        seen["sum"] = strategy.reduce(tf.distribute.ReduceOp.SUM, found["pair"][1], axis=None)
    return seen


def replicas_reduce(strategy, graph):
    """Replicas reduce in their own context, in a branch and in a loop too."""

    def step(rows):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.reduce_sum(rows, 0))
        pair = context.all_reduce("MEAN", [tf.reduce_mean(rows), tf.reduce_mean(rows**2)])
        gathered = tf.sort(tf.reshape(context.all_gather(rows, axis=0), [-1]))
        return [total, *pair, gathered]

    def in_a_loop(rows):
        context, total = tf.distribute.get_replica_context(), tf.zeros([FEATURES])
        for _ in tf.range(3):
            total += context.all_reduce("SUM", tf.reduce_sum(rows, 0))
        return [total]

    seen = {}
    for rows in batches(strategy, numbers(1, ROWS, FEATURES), size=ROWS):
        for function in (step, in_a_loop) if graph else (step,):
            run = tf.function(function) if graph else function
            for i, value in enumerate(strategy.run(run, args=(rows[0],))):
                seen[f"{function.__name__} {i}"] = strategy.experimental_local_results(value)[0]
    return seen


def replicas_make_their_values(strategy):
    """Values are made by replica numbers, and by a function for each worker."""
    table = numbers(1, 12, FEATURES)

    def of_worker(context):
        size = context.get_per_replica_batch_size(4)
        data = tf.data.Dataset.from_tensor_slices(table)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    data = strategy.distribute_datasets_from_function(of_worker)
    sums = [strategy.run(lambda rows: tf.reduce_sum(rows, 0), args=(rows,)) for rows in data]
    return {"total": np.sum([strategy.reduce("SUM", each, axis=None) for each in sums], axis=0)}


def epochs_are_shared_out(strategy):
    """Each row once, in every epoch, and the short batch at the end, too."""
    table, seen = numbers(1, 10, FEATURES), {}
    data = batches(strategy, table, table[:, :1], size=4)
    for epoch in range(2):
        for number, (x, y) in enumerate(data):
            for name, value in (("x", x), ("y", y)):
                rows = np.concatenate(
                    [v.numpy() for v in strategy.experimental_local_results(value)]
                )
                total = strategy.reduce("SUM", value, axis=0)
                seen[f"{name} of {number} in epoch {epoch}"] = total
                assert len(rows) <= 4
    return seen


def loops_are_in_a_function(strategy):
    """A whole epoch as one graph, as TensorFlow's guide shows."""
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        tracker = keras.metrics.Mean()

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((model(x, training=True) - y) ** 2, -1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=4)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        tracker.update_state(losses)
        return loss

    @tf.function
    def epoch(data):
        total = 0.0
        for x, y in data:
            total += strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)
        return total

    data = batches(strategy, numbers(1, ROWS, FEATURES), numbers(2, ROWS, 2), size=4)
    seen = {"losses": [epoch(data), epoch(data)], "tracker": tracker.result()}
    return seen | weights_of(strategy, model)


# ---- random state


def seeds_go_on_alike(strategy, graph):
    """Outside of replicas the state is one device's; each replica draws numbers of its own."""
    with strategy.scope():
        generator = keras.random.SeedGenerator(42)
    seen = {"begins": generator.state.numpy()}

    def draw():
        return keras.random.normal([4], seed=generator)

    for time in range(2):
        drawn = strategy.run(tf.function(draw) if graph else draw)
        rows = {each.numpy().tobytes() for each in strategy.experimental_local_results(drawn)}
        assert len(rows) == len(copies(strategy, generator.state))
        seen[f"after {time}"] = generator.state.numpy()
    generator.state.assign([5, 6])
    return seen | {"assigned": generator.state.numpy()}


def dropout_draws_on_each_replica(strategy):
    """Count about as many zeros as on one device; the seed advances by as many steps."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([1000]), layers.Dropout(0.5, seed=3)])
    (generator,) = [v for v in model.variables if v.path.endswith("seed_generator_state")]
    before = generator.numpy()

    @tf.function
    def run(rows):
        return strategy.run(lambda x: model(x, training=True), args=(rows,))

    for rows in batches(strategy, np.ones([4, 1000], np.float32), size=4):
        kept = strategy.gather(run(rows[0]), axis=0).numpy()
        assert len({row.tobytes() for row in kept}) == 4
        assert 0.45 < np.mean(kept > 0) < 0.55
    return {"steps": generator.numpy() - before}


# ---- metrics


class Range(keras.metrics.Metric):
    """A metric of the user's own, of two sums."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight(name="total", initializer="zeros")
        self.squares = self.add_weight(name="squares", shape=[2], initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(keras.ops.sum(y_pred))
        self.squares.assign(self.squares + keras.ops.sum(keras.ops.square(y_pred), 0))

    def result(self):
        return keras.ops.max(self.squares) - self.total


def classes(rows):
    """Labels, and probabilities of three classes."""
    scores = np.exp(numbers(3, rows, 3))
    return numbers(4, rows, 3).argmax(1), scores / scores.sum(1, keepdims=True)


def metrics_add_up(strategy, make, kind, graph):
    """Over replicas that hold different numbers of rows, with weights and without."""
    labels, scores = classes(11)
    truths = {
        "labels": (labels, scores),
        "one of two": ((labels > 0)[:, None], scores[:, :1]),
        "classes": (np.eye(3)[labels], scores),
        "numbers": (numbers(5, 11, 2), numbers(6, 11, 2)),
        "kinds": (labels, scores.argmax(1)),
    }
    truth, guess = (np.asarray(value, np.float32) for value in truths[kind])
    weights = np.linspace(0.5, 2, 11).astype(np.float32)
    with strategy.scope():
        plain, weighted = make(), make()

    def step(y, p, w):
        plain.update_state(y, p)
        weighted.update_state(y, p, sample_weight=w)

    run, seen = tf.function(step) if graph else step, []
    for _ in range(2):
        for rows in batches(strategy, truth, guess, weights, size=4):
            strategy.run(run, args=rows)
            seen += [plain.result(), weighted.result()]
        plain.reset_state()
        weighted.reset_state()
    return {str(i): value for i, value in enumerate(seen)}


METRICS = {
    "MeanSquaredError": "numbers",
    "RootMeanSquaredError": "numbers",
    "CosineSimilarity": "numbers",
    "R2Score": "numbers",
    "SparseCategoricalAccuracy": "labels",
    "SparseTopKCategoricalAccuracy": "labels",
    "SparseCategoricalCrossentropy": "labels",
    "CategoricalAccuracy": "classes",
    "F1Score": "classes",
    "AUC": "one of two",
    "Precision": "one of two",
    "Recall": "one of two",
    "FalseNegatives": "one of two",
    "BinaryIoU": "one of two",
}


def own_metrics_add_up(strategy, graph):
    seen = metrics_add_up(strategy, Range, "numbers", graph)
    return {name: seen[name] for name in seen if int(name) % 2 == 0}


def means_are_weighed(strategy):
    with strategy.scope():
        mean, total = keras.metrics.Mean(), keras.metrics.Sum()

    @tf.function
    def step(x, w):
        mean.update_state(x, sample_weight=w)
        total.update_state(x)

    for rows in batches(strategy, numbers(1, 11), np.arange(11, dtype=np.float32), size=4):
        strategy.run(step, args=rows)
    return {"mean": mean.result(), "sum": total.result()}


# ---- files


def in_a_folder(scene, strategy):
    with tempfile.TemporaryDirectory() as folder:
        return scene(strategy, Path(folder))


def checkpoints(strategy, folder):
    """Written within a training, and gone on with by a model that began otherwise."""
    with strategy.scope():
        model = compiled()
    fit(model)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "saved")
    keras.utils.set_random_seed(2)
    with strategy.scope():
        other = compiled(rate=0.5)
        other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
    return fit(other) | weights_of(strategy, other)


def files_of_models(strategy, folder):
    with strategy.scope():
        model = compiled()
    fit(model)
    model.save(folder / "model.keras")
    with strategy.scope():
        other = keras.models.load_model(folder / "model.keras")
    seen = fit(other)
    state = {f"state {i}": v.numpy() for i, v in enumerate(other.optimizer.variables)}
    return seen | state | weights_of(strategy, other)


def files_of_weights(strategy, folder):
    with strategy.scope():
        model = compiled()
        model.optimizer.build(model.trainable_variables)
    fit(model)
    model.save_weights(folder / "some.weights.h5")
    fit(model)
    model.load_weights(folder / "some.weights.h5")
    return fit(model) | weights_of(strategy, model)


BOTH = {"graph": True, "eager": False}
SCENES = scenes(
    variables_begin_alike,
    variables_are_assigned_from_outside,
    layers_keep_state,
    models_are_cloned,
    values_are_reduced,
    replicas_make_their_values,
    epochs_are_shared_out,
    loops_are_in_a_function,
    dropout_draws_on_each_replica,
    means_are_weighed,
    **{
        f"{scene.__name__} {how}": partial(scene, graph=graph)
        for scene in (
            each_replica_counts,
            models_run_on_replicas,
            replicas_reduce,
            seeds_go_on_alike,
            own_metrics_add_up,
        )
        for how, graph in BOTH.items()
    },
    **{
        f"variables_are_assigned_on_replicas {kind} {how}": partial(
            variables_are_assigned_on_replicas, aggregation=kind, graph=graph
        )
        for kind in ("none", "sum", "mean", "only_first_replica")
        for how, graph in BOTH.items()
    },
    **{
        f"metrics_add_up {name} {how}": partial(
            metrics_add_up, make=getattr(keras.metrics, name), kind=kind, graph=graph
        )
        for name, kind in METRICS.items()
        for how, graph in BOTH.items()
    },
    **{
        scene.__name__: partial(in_a_folder, scene)
        for scene in (checkpoints, files_of_models, files_of_weights)
    },
)
