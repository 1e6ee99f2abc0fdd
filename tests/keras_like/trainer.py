"""``fit``, ``evaluate``, ``predict`` and what else a model's user calls, in all ways to run."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from tests.keras_like.scenes import numbers, scenes, weights_of

ROWS, BATCH, FEATURES, CLASSES = 29, 8, 5, 3
STEPS = 4  # in an epoch

# Eager or in a graph, one step at a time or three.
WAYS = {
    f"{'eager' if eager else 'graph'} {count}": {"run_eagerly": eager, "steps_per_execution": count}
    for eager in (False, True)
    for count in (1, 3)
}


def data(rows=ROWS, seed=1):
    x = numbers(seed, rows, FEATURES)
    return x, (x @ numbers(9, FEATURES, CLASSES)).argmax(1)


def hidden(inputs):
    return layers.Dense(6, activation="tanh")(inputs)


def classifier(kind=keras.Model):
    inputs = keras.Input([FEATURES])
    return kind(inputs, layers.Dense(CLASSES, activation="softmax")(hidden(inputs)))


def compiled(strategy, make=classifier, **how):
    """A model, made and compiled in the scope."""
    settings = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
        **how,
    }
    with strategy.scope():
        model = make()
        if not isinstance(settings["optimizer"], str):
            kind, config = type(settings["optimizer"]), settings["optimizer"].get_config()
            settings["optimizer"] = kind.from_config(config)
        model.compile(**settings)
    return model


def fit(model, *given, **how):
    settings = {"epochs": 2, "shuffle": False, "verbose": 0}
    if len(given) > 1:
        settings["batch_size"] = BATCH
    return model.fit(*given, **settings | how).history


def left(strategy, model, seen):
    """The numbers of a history and the model's weights."""
    return dict(seen) | weights_of(strategy, model)


# ---- all that is done with a model, in all ways


def fits(strategy, way, **how):
    model = compiled(strategy, **way)
    return left(strategy, model, fit(model, *data(), **how))


def judges(strategy, way):
    model, (x, y) = compiled(strategy, **way), data()
    fit(model, x, y)
    quiet = {"batch_size": BATCH, "verbose": 0}
    seen = model.evaluate(x[:19], y[:19], return_dict=True, **quiet)
    listed = model.evaluate(x[:8], y[:8], **quiet)
    return seen | {
        "listed": listed,
        "predicted": model.predict(x[:19], **quiet),
        "one row": model.predict(x[:1], verbose=0),
        "some steps": model.predict(x, steps=2, **quiet),
        "evaluated in some steps": model.evaluate(x, y, steps=2, **quiet),
    }


def judges_untrained(strategy, way):
    """A model that knows of no data yet, and that was compiled with a loss alone."""
    kernel = keras.initializers.Ones()
    make = partial(keras.Sequential, [layers.Dense(CLASSES, kernel_initializer=kernel)])
    model, (x, y) = compiled(strategy, make, loss="mse", metrics=None, **way), data()
    return {
        "loss": model.evaluate(x, np.eye(CLASSES)[y], batch_size=BATCH, verbose=0),
        "predicted": model.predict(x, batch_size=BATCH, verbose=0),
    }


def on_batches(strategy, way):
    model, (x, y) = compiled(strategy, **way), data(BATCH)
    weight = np.linspace(0, 2, BATCH).astype(np.float32)
    return {
        "trained": [model.train_on_batch(x, y) for _ in range(3)],
        "weighted": model.train_on_batch(x, y, sample_weight=weight),
        "by class": model.train_on_batch(x, y, class_weight={0: 0.5, 1: 1.0, 2: 3.0}),
        "in a dict": list(model.train_on_batch(x, y, return_dict=True).values()),
        "tested": model.test_on_batch(x, y),
        "tested and weighted": model.test_on_batch(x, y, sample_weight=weight),
    } | weights_of(strategy, model)


def predicts_on_a_batch(strategy, way):
    model, (x, y) = compiled(strategy, **way), data(BATCH)
    model.train_on_batch(x, y)
    return {"predicted": model.predict_on_batch(x)}


TASKS = {
    "fits": fits,
    "fits with a split": partial(fits, validation_split=0.3),
    "fits with other data": partial(fits, validation_data=data(21, seed=2)),
    "fits and validates in part": partial(
        fits,
        epochs=4,
        validation_data=data(21, seed=2),
        validation_batch_size=4,
        validation_steps=3,
        validation_freq=2,
    ),
    "fits with weighed validation": partial(
        fits, validation_data=(*data(21, seed=2), np.linspace(0, 1, 21))
    ),
    "fits with sample weights": partial(fits, sample_weight=np.linspace(0, 2, ROWS)),
    "fits with class weights": partial(fits, class_weight={0: 0.5, 1: 1.0, 2: 3.0}),
    "fits from a later epoch": partial(fits, initial_epoch=2, epochs=4),
    "judges": judges,
    "judges untrained": judges_untrained,
    "on batches": on_batches,
    "predicts on a batch": predicts_on_a_batch,
}

# ---- where data come from


def dataset():
    return tf.data.Dataset.from_tensor_slices(data()).batch(BATCH)


def weighted_dataset():
    rows = (*data(), np.linspace(0, 2, ROWS).astype(np.float32))
    return tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)


def parts():
    x, y = data()
    return [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, ROWS, BATCH)]


def endless():
    while True:
        yield from parts()


def weighted_parts():
    while True:
        for x, y in parts():
            yield x, y, np.linspace(0, 2, len(x)).astype(np.float32)


class Parts(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, at):
        return parts()[at]


class Listening(Parts):
    """Hears of each epoch."""

    def __init__(self, **how):
        super().__init__(**how)
        self.heard = []

    def on_epoch_begin(self):
        self.heard.append("begins")

    def on_epoch_end(self):
        self.heard.append("ends")


SOURCES = {
    "dataset": (dataset, {}),
    "dataset shuffled": (lambda: dataset().shuffle(STEPS), {}),
    "dataset with weights": (weighted_dataset, {}),
    "dataset without end": (lambda: dataset().repeat(), {"steps_per_epoch": STEPS}),
    "dataset in part": (dataset, {"steps_per_epoch": 2}),
    "generator": (lambda: (part for part in parts()), {"epochs": 1}),
    "generator without end": (endless, {"steps_per_epoch": STEPS}),
    "generator with weights": (weighted_parts, {"steps_per_epoch": STEPS}),
    "PyDataset": (Parts, {}),
    "PyDataset shuffled": (Listening, {"shuffle": True}),
    "PyDataset with workers": (partial(Parts, workers=2, max_queue_size=4), {}),
    "PyDataset with workers shuffled": (
        partial(Listening, workers=2, max_queue_size=4),
        {"shuffle": True},
    ),
}


def reads(strategy, source, way):
    make, how = SOURCES[source]
    model = compiled(strategy, **way)
    # What is read ahead of a generator without end is lost when a validation is over.
    validation = {} if "steps_per_epoch" in how else {"validation_data": make()}
    source = make()
    seen = fit(model, source, **how | validation)
    seen["heard"] = [what == "begins" for what in getattr(source, "heard", ())]
    seen["evaluated"] = model.evaluate(make(), steps=2, verbose=0)
    return left(strategy, model, seen)


def reads_tensors(strategy):
    x, y = data()
    model = compiled(strategy)
    seen = fit(model, tf.constant(x), tf.constant(y), validation_split=0.3)
    seen["predicted"] = model.predict(tf.constant(x), batch_size=BATCH, verbose=0)
    return left(strategy, model, seen)


# ---- what goes in and comes out


class Sum(keras.Model):
    """Model that is built by its data: a list, a dict or both."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(4, activation="tanh") for _ in range(2)]
        self.head = layers.Dense(CLASSES, activation="softmax")

    def call(self, inputs):
        flat = keras.tree.flatten(inputs)
        return self.head(sum(part(x) for part, x in zip(self.parts, flat)))


class Several(Sum):
    """Gives two things for one input, together as ``join`` makes them."""

    def __init__(self, join):
        super().__init__()
        self.join = join
        self.tail = layers.Dense(1)

    def call(self, inputs):
        between = self.parts[0](inputs)
        return self.join(self.head(between), self.tail(between))


JOINED = {
    "list": lambda first, second: [first, second],
    "tuple": lambda first, second: (first, second),
    "dict": lambda first, second: {"kind": first, "size": second},
}


def takes(strategy, kind):
    x, y = data()
    left_half, right = x[:, :3], x[:, 3:]
    given = {
        "list": [left_half, right],
        "tuple": (left_half, right),
        "dict": {"a": left_half, "b": right},
        "nested": {"a": [left_half], "b": {"c": right}},
    }[kind]
    model = compiled(strategy, Sum)
    seen = fit(model, given, y, validation_split=0.3 if kind == "list" else 0.0)
    seen["evaluated"] = model.evaluate(given, y, batch_size=BATCH, verbose=0)
    seen["predicted"] = model.predict(given, batch_size=BATCH, verbose=0)
    return left(strategy, model, seen)


def gives(strategy, kind):
    """Losses and metrics of several outputs, weighed."""
    x, y = data()
    z = x[:, :1] ** 2
    each = JOINED[kind]
    model = compiled(
        strategy,
        partial(Several, each),
        loss=each("sparse_categorical_crossentropy", "mse"),
        metrics=each("accuracy", "mae"),
        loss_weights=each(0.7, 0.2),
    )
    seen = fit(model, x, each(y, z))
    evaluated = model.evaluate(x, each(y, z), batch_size=BATCH, verbose=0)
    predicted = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    seen |= {"evaluated": evaluated, "first": predicted[0], "second": predicted[1]}
    return left(strategy, model, seen)


def not_built(strategy):
    make = partial(keras.Sequential, [layers.Dense(4), layers.Dense(CLASSES, activation="softmax")])
    model = compiled(strategy, make)
    return left(strategy, model, fit(model, *data()))


# ---- steps of one's own


class Numbers:
    """Adds numbers of its own to what Keras's steps tell."""

    def train_step(self, data):
        return super().train_step(data) | {"ten": 10.0}

    def test_step(self, data):
        told = super().test_step(data) | {"five": 5.0}
        # Eagerly a tensor beside a loss of Keras is taken for a part of a sum, as that loss is.
        return told if tf.executing_eagerly() else told | {"six": tf.constant(6.0)}


class OwnNumbers(Numbers, keras.Model):
    pass


class MixedIn(TensorFlowTrainer, layers.Dense):
    """No ``keras.Model``: a layer to which its user has given a trainer."""

    def __init__(self):
        layers.Dense.__init__(self, CLASSES, activation="softmax", kernel_initializer="ones")
        TensorFlowTrainer.__init__(self)


class MixedInWithNumbers(Numbers, MixedIn):
    pass


class OwnLoop(keras.Model):
    """Steps as Keras's guide writes them, with metrics of the model's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mean = keras.metrics.Mean(name="mean")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="hits")

    @property
    def metrics(self):
        return [self.mean, self.hits]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            guessed = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=guessed)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self._told(y, guessed)

    def test_step(self, data):
        x, y = data
        return self._told(y, self(x, training=False))

    def predict_step(self, data):
        return {"guess": 2.0 * self(data[0] if isinstance(data, tuple) else data)}

    def _told(self, y, guessed):
        self.mean.update_state(guessed[:, 0])
        self.hits.update_state(y, guessed)
        return {metric.name: metric.result() for metric in self.metrics}


class OwnLoss(keras.Model):
    """Model with Keras's loss in a metric, and a loss term of the layers' own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = keras.metrics.Mean(name="kept")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.kept.update_state(loss * 4)
        return loss


class OwnMetrics(keras.Model):
    """Computes metrics itself, and tells them under other names."""

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        told = super().compute_metrics(x, y, y_pred, sample_weight)
        return {f"own_{name}": value for name, value in told.items()}


OWN = {
    kind.__name__: partial(classifier, kind) for kind in (OwnNumbers, OwnLoop, OwnLoss, OwnMetrics)
} | {kind.__name__: kind for kind in (MixedIn, MixedInWithNumbers)}


def has_own(strategy, what, way):
    """All rows in whole batches: what a step tells of several metrics is told of the last one."""
    model, (x, y) = compiled(strategy, OWN[what], **way), data(32)
    seen = fit(model, x, y, validation_data=data(16, seed=2))
    seen["evaluated"] = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    predicted = keras.tree.flatten(model.predict(x, batch_size=BATCH, verbose=0))
    return left(strategy, model, seen | {"predicted": predicted[0]})


# ---- callbacks


class Heard(keras.callbacks.Callback):
    """All numbers that callbacks are told, in their order."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def _note(self, event, logs):
        for name, value in (logs or {}).items():
            self.seen.setdefault(f"{event}: {name}", []).append(np.asarray(value))

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch", {"number": batch, **(logs or {})})

    def on_test_batch_end(self, batch, logs=None):
        self._note("test batch", {"number": batch, **(logs or {})})

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch", {"number": epoch, **(logs or {})})

    def on_test_end(self, logs=None):
        self._note("test", logs)

    def on_train_end(self, logs=None):
        self._note("end", logs)


def callbacks_hear(strategy, way, rows):
    """Replicas report the mean of their counts within an epoch; its end is exact."""
    heard = Heard()
    model = compiled(strategy, **way)
    fit(model, *data(rows), validation_data=data(16, seed=2), callbacks=[heard])
    if rows % BATCH == 0:
        return heard.seen
    within = ("batch: accuracy", "batch: loss")
    return {name: value for name, value in heard.seen.items() if name not in within}


class Stop(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self._batch = batch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch >= self._batch

    def on_test_batch_end(self, batch, logs=None):
        self.model.stop_evaluating = batch >= self._batch

    def on_predict_batch_end(self, batch, logs=None):
        self.model.stop_predicting = batch >= self._batch


def loops_are_stopped(strategy, way):
    model, (x, y) = compiled(strategy, **way), data()
    seen = fit(model, x, y, epochs=3, callbacks=[Stop(1)])
    quiet = {"batch_size": BATCH, "verbose": 0, "callbacks": [Stop(1)]}
    seen["evaluated"] = model.evaluate(x, y, **quiet)
    seen["predicted"] = model.predict(x, **quiet)
    return left(strategy, model, seen)


class Counting(keras.Model):
    """Has a number that a callback changes between steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs, training=None):
        return super().call(inputs, training=training) * (1 + 0 * self.count)


class Count(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.count.assign_add(1)
        self.model.optimizer.learning_rate = 0.1 / self.model.count.numpy()


def callbacks_change_state(strategy, way):
    model = compiled(strategy, partial(classifier, Counting), **way)
    seen = fit(model, *data(), callbacks=[Count()])
    return left(strategy, model, seen) | {"count": model.count.numpy()}


def callbacks_of_keras(strategy):
    with tempfile.TemporaryDirectory() as folder:
        logger = keras.callbacks.CSVLogger(Path(folder) / "log.csv")
        callbacks = [
            logger,
            keras.callbacks.ReduceLROnPlateau(patience=1, min_delta=0.5),
            keras.callbacks.EarlyStopping(patience=3, min_delta=0.5, restore_best_weights=True),
            keras.callbacks.TerminateOnNaN(),
        ]
        model = compiled(strategy)
        seen = fit(model, *data(), epochs=8, validation_data=data(16, seed=2), callbacks=callbacks)
        lines = np.genfromtxt(Path(folder) / "log.csv", delimiter=",", skip_header=1)
    return left(strategy, model, seen) | {"logged": lines}


# ---- several fits


def several_fits(strategy, way):
    model, seen = compiled(strategy, **way), {}
    for number in range(3):
        history = fit(model, *data(ROWS - 8 * number, seed=number), epochs=1)
        seen |= {f"{name} {number}": value for name, value in history.items()}
        seen[f"judged {number}"] = model.evaluate(*data(), batch_size=BATCH, verbose=0)
    return left(strategy, model, seen)


def compiled_again(strategy):
    model = compiled(strategy)
    seen = {f"first {name}": value for name, value in fit(model, *data()).items()}
    model.layers[1].trainable = False
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(0.01),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", "sparse_categorical_crossentropy"],
            weighted_metrics=["accuracy"],
        )
    seen |= fit(model, *data(), sample_weight=np.linspace(0, 1, ROWS))
    return left(strategy, model, seen)


def losses_of_layers_alone(strategy):
    class Costs(layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    def make():
        return keras.Sequential([keras.Input([FEATURES]), layers.Dense(2), Costs()])

    model = compiled(strategy, make, loss=None, metrics=None)
    return left(strategy, model, fit(model, data()[0], batch_size=BATCH))


SCENES = scenes(
    reads_tensors,
    not_built,
    callbacks_of_keras,
    compiled_again,
    losses_of_layers_alone,
    **{
        f"{task} {way}": partial(scene, way=WAYS[way])
        for task, scene in TASKS.items()
        for way in WAYS
    },
    **{
        f"reads {source} {way}": partial(reads, source=source, way=WAYS[way])
        for source in SOURCES
        for way in WAYS
    },
    **{f"takes {kind}": partial(takes, kind=kind) for kind in ("list", "tuple", "dict", "nested")},
    **{f"gives {kind}": partial(gives, kind=kind) for kind in JOINED},
    **{
        f"has_own {what} {way}": partial(has_own, what=what, way=WAYS[way])
        for what in OWN
        for way in WAYS
    },
    **{
        f"{scene.__name__} {way}": partial(scene, way=WAYS[way])
        for scene in (loops_are_stopped, callbacks_change_state, several_fits)
        for way in WAYS
    },
    **{
        f"callbacks_hear of {rows} rows {way}": partial(callbacks_hear, rows=rows, way=WAYS[way])
        for rows in (32, ROWS)
        for way in WAYS
    },
)
