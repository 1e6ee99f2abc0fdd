"""Programs of everyday, as in Keras's guides, that shares of the batch must not change.

Each program builds a model in a strategy's scope, trains it, and returns numbers by name. Numbers
have 64 bits, so that a wrong weight of a row cannot hide behind rounding.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.strategy.doubles import doubles

FEATURES, CLASSES, BATCH = 6, 3, 8
ROWS = 45  # the last batch has 5 rows


def numbers(rows=ROWS, seed=0):
    dice = np.random.default_rng(seed)
    x = dice.standard_normal((rows, FEATURES))
    return x, dice.integers(0, CLASSES, rows), dice.uniform(0.1, 2, rows)


def classifier(**compiled):
    net = [
        keras.Input([FEATURES]),
        layers.Dense(8, "tanh", kernel_regularizer="l2"),
        layers.BatchNormalization(),
        layers.Dense(CLASSES),
    ]
    how = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]} | compiled
    model = keras.Sequential(net)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **how)
    return model


def seen(history, **more):
    return {**history.history, **more}


def arrays():
    """Arrays, sample weights, validation, evaluation and prediction."""
    model, (x, y, w) = classifier(weighted_metrics=["accuracy"]), numbers()
    history = model.fit(
        x, y, BATCH, 2, 0, sample_weight=w, shuffle=False, validation_data=numbers(19, 1)
    )
    evaluated = model.evaluate(x, y, batch_size=7, sample_weight=w, verbose=0)
    return model, seen(history, evaluated=evaluated, predicted=model.predict(x, 7, verbose=0))


def class_weights():
    model, (x, y, _) = classifier(), numbers()
    weights = {0: 0.2, 1: 3.0, 2: 1.0}
    history = model.fit(
        x, y, BATCH, 2, 0, class_weight=weights, validation_split=0.2, shuffle=False
    )
    return model, seen(history)


def generator():
    """A generator whose batches differ in size, some smaller than the number of replicas."""
    model, (x, y, w) = classifier(), numbers()

    def batches():
        ends = [0, 8, 9, 17, 24, 25, 33, ROWS]
        while True:
            for begin, end in itertools.pairwise(ends):
                yield x[begin:end], y[begin:end], w[begin:end]

    history = model.fit(batches(), steps_per_epoch=7, epochs=2, verbose=0)
    return model, seen(history)


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return tuple(part[index * BATCH : (index + 1) * BATCH] for part in numbers())


def py_dataset():
    model = classifier()
    history = model.fit(
        Pieces(workers=2), epochs=2, verbose=0, shuffle=False, validation_data=Pieces()
    )
    return model, seen(history)


def unknown_size():
    """A dataset of unknown size with prefetching, and several steps in one execution."""
    model, (x, y, _) = classifier(steps_per_execution=3), numbers()
    data = tf.data.Dataset.from_tensor_slices((x, y)).filter(lambda x, y: x[0] > -1)
    data = data.batch(BATCH).prefetch(2)
    history = model.fit(data, epochs=2, verbose=0, validation_data=data)
    return model, seen(history, evaluated=model.evaluate(data, verbose=0))


def endless():
    model, (x, y, _) = classifier(), numbers()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    history = model.fit(
        data, steps_per_epoch=7, epochs=2, verbose=0, validation_data=data, validation_steps=3
    )
    return model, seen(history)


def masked():
    """A recurrent net with masks: rows have different numbers of steps."""
    inputs = keras.Input([5, FEATURES])
    steps = layers.LSTM(4, return_sequences=True)(layers.Masking()(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(steps))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dice = np.random.default_rng(0)
    x = dice.standard_normal((ROWS, 5, FEATURES))
    for row, length in enumerate(dice.integers(1, 6, ROWS)):
        x[row, length:] = 0
    y = dice.integers(0, CLASSES, (ROWS, 5))
    history = model.fit(x, y, BATCH, 2, 0, shuffle=False)
    return model, seen(history, predicted=model.predict(x, 7, verbose=0))


def several_outputs():
    inputs = {"a": keras.Input([FEATURES], name="a"), "b": keras.Input([2], name="b")}
    joined = layers.Concatenate()([inputs["a"], inputs["b"]])
    hidden = layers.BatchNormalization()(layers.Dense(8, "tanh")(joined))
    outputs = {"size": layers.Dense(1, name="size")(hidden), "two": layers.Dense(2)(hidden)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"size": "mae", "two": "mse"}, loss_weights={"size": 0.3, "two": 2.0})
    x, _, w = numbers()
    x, y = {"a": x, "b": x[:, :2]}, {"size": x.sum(1, keepdims=True), "two": x[:, 2:4]}
    history = model.fit(x, y, BATCH, 2, 0, shuffle=False, sample_weight={"size": w, "two": w[::-1]})
    return model, seen(history)


class OwnStep(keras.Model):
    """A step of one's own, with an added loss and a metric of one's own."""

    def __init__(self):
        super().__init__()
        self.hidden, self.norm = layers.Dense(8, "tanh"), layers.BatchNormalization()
        self.head = layers.Dense(CLASSES)
        self.mean = keras.metrics.Mean("own")

    @property
    def metrics(self):
        return [*super().metrics, self.mean]

    def call(self, x, training=False):
        hidden = self.norm(self.hidden(x), training=training)
        self.add_loss(0.1 * tf.reduce_mean(hidden**2))
        return self.head(hidden)

    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=w)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.mean.update_state(tf.reduce_sum(outputs, -1), w)
        return self.compute_metrics(x, y, outputs, w)


def own_step():
    model = OwnStep()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    history = model.fit(*numbers()[:2], BATCH, 2, 0, shuffle=False, sample_weight=numbers()[2])
    return model, seen(history)


def in_single_batches(model):
    """Return what ``train_on_batch`` and its kin give, also for a batch of one row."""
    x, y, w = numbers()
    found = {}
    for number, end in enumerate((8, 1, 5)):
        trained = model.train_on_batch(x[:end], y[:end], w[:end], return_dict=True)
        tested = model.test_on_batch(x[:end], y[:end], w[:end], return_dict=True)
        found |= {f"trained {name} {number}": value for name, value in trained.items()}
        found |= {f"tested {name} {number}": value for name, value in tested.items()}
        found[f"predicted {number}"] = model.predict_on_batch(x[:end])
    return found


def single_batches():
    model = classifier()
    return model, in_single_batches(model)


def one_row_each():
    """Batches of fewer rows than replicas."""
    model, (x, y, _) = classifier(optimizer=keras.optimizers.SGD(0.01)), numbers(5)
    history = model.fit(x, y, 1, 2, 0, shuffle=False)
    return model, seen(history, predicted=model.predict(x, 1, verbose=0))


def windows():
    """Accumulated gradients, of which the last window ends in the next epoch."""
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, global_clipnorm=1.0)
    model, (x, y, w) = classifier(optimizer=optimizer), numbers()
    history = model.fit(x, y, BATCH, 3, 0, shuffle=False, sample_weight=w)
    return model, seen(history)


def metrics_of_all_kinds():
    inputs = keras.Input([FEATURES])
    model = keras.Model(inputs, layers.Dense(1, "sigmoid")(inputs))
    metrics = [keras.metrics.AUC(num_thresholds=20, name="auc"), "precision", "recall", "mae"]
    model.compile("adam", "binary_crossentropy", metrics=metrics)
    x, y, _ = numbers()
    y = (y > 0).astype("float64")[:, np.newaxis]
    early = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    history = model.fit(
        x, y, BATCH, 3, 0, shuffle=False, validation_data=(x[:11], y[:11]), callbacks=[early]
    )
    return model, seen(history)


PROGRAMS = {
    program.__name__: program
    for program in (
        arrays,
        class_weights,
        generator,
        py_dataset,
        unknown_size,
        endless,
        masked,
        several_outputs,
        own_step,
        single_batches,
        one_row_each,
        windows,
        metrics_of_all_kinds,
    )
}


def result(strategy, name):
    """Return what a program leaves: its numbers and the weights of its model."""
    keras.utils.set_random_seed(1)
    with doubles(), strategy.scope():
        model, found = PROGRAMS[name]()
    weights = {f"weight {i}": w.numpy() for i, w in enumerate(model.weights)}
    return {k: np.asarray(v, "float64").tolist() for k, v in (found | weights).items()}


def compare(expected, found):
    """Assert that two results are equal."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-10, 1e-10, err_msg=name)
