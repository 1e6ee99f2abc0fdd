"""Programs of the kinds that Keras's guides and examples show, for grids.

Each program builds a model in a strategy's scope, trains it, and returns the model and numbers by
name. Numbers have 64 bits, so that a wrong sum cannot hide behind rounding. Layers are named "up"
and "down" so that a rule can cut them, and no layer sees the size of a microbatch.
"""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.strategy.doubles import doubles
from tests.strategy.everyday import BATCH, CLASSES, FEATURES, ROWS, in_single_batches, numbers


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(**compiled):
    inputs = keras.Input([FEATURES])
    hidden = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(inputs))
    model = keras.Model(
        inputs, layers.Dense(CLASSES, name="last")(layers.Activation("tanh")(hidden))
    )
    how = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"]} | compiled
    model.compile(loss=crossentropy(), **how)
    return model


def fit(model, x=None, y=None, epochs=2, **more):
    if x is None:
        x, y, _ = numbers()
    return model.fit(
        x, y, batch_size=BATCH, epochs=epochs, verbose=0, shuffle=False, **more
    ).history


def plainly(function, *arguments, **more):
    """Call a function in no strategy's scope: scopes are those of a thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments, **more).result()


def several_inputs():
    """A later stage needs one of two inputs; an early stage makes one of two outputs."""
    inputs = {"text": keras.Input([5], dtype="int32"), "more": keras.Input([2])}
    x = layers.Embedding(10, 4, name="table")(inputs["text"])
    x = layers.Dense(12, "tanh", name="up")(layers.Flatten()(x))
    early = layers.Dense(1, name="early")(x)
    x = layers.Concatenate()([layers.Dense(8, name="down")(x), inputs["more"]])
    outputs = {"early": early, "late": layers.Dense(CLASSES, name="late")(x)}
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adam(0.01, global_clipnorm=0.1),
        {"early": "mse", "late": crossentropy()},
        loss_weights={"early": 0.3, "late": 2.0},
        metrics={"early": ["mae"], "late": ["accuracy"]},
    )
    dice = np.random.default_rng(0)
    x = {"text": dice.integers(0, 10, (ROWS, 5)), "more": dice.standard_normal((ROWS, 2))}
    y = {"early": dice.standard_normal((ROWS, 1)), "late": dice.integers(0, CLASSES, ROWS)}
    history = fit(model, x, y, validation_data=(x, y))
    predicted = model.predict(x, BATCH, verbose=0)
    return model, history | {f"predicted {k}": v for k, v in predicted.items()}


@keras.saving.register_keras_serializable("guides")
class Gate(layers.Layer):
    """Custom layer with weights of two kinds, an added loss, and an argument ``training``."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="calls", dtype="float64"
        )

    def call(self, x, training=False):
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return x * ops.sigmoid(self.scale) if training else x * ops.sigmoid(self.scale) + 0.0


def own_layers():
    """A Lambda, a layer of one's own, functions of ``keras.ops`` and regularizers."""
    inputs = keras.Input([FEATURES])
    x = layers.Lambda(lambda x: ops.concatenate([x, x**2], -1))(inputs)
    x = layers.Dense(12, "tanh", kernel_regularizer="l2", name="up")(x)
    x = Gate(name="gate")(layers.Dense(8, activity_regularizer="l1", name="down")(x))
    x = ops.concatenate([ops.relu(x), 0.5 * x + 1], axis=-1)
    model = keras.Model(inputs, layers.Dense(CLASSES, name="last")(x))
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model, fit(model)


def callbacks():
    model = classifier(optimizer=keras.optimizers.SGD(0.5))
    x, y, _ = numbers(19, 1)
    rates = []
    with tempfile.TemporaryDirectory() as folder:
        best = Path(folder) / "best.keras"
        chosen = [
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.3),
            keras.callbacks.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
            keras.callbacks.ModelCheckpoint(best, save_best_only=True),
            keras.callbacks.CSVLogger(Path(folder) / "log.csv"),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate))
            ),
        ]
        history = fit(model, epochs=8, validation_data=(x, (y + 1) % CLASSES), callbacks=chosen)
        saved = plainly(keras.models.load_model, best)
    more = {f"best {i}": w for i, w in enumerate(saved.get_weights())}
    return model, history | more | {"rates": rates}


def rates():
    """A schedule of the optimizer, then one of a callback, with weight decay."""
    decay = keras.optimizers.schedules.CosineDecay(0.05, 10)
    model = classifier(optimizer=keras.optimizers.AdamW(decay, weight_decay=0.1))
    history = fit(model)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), crossentropy())
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    return model, history | {f"again {k}": v for k, v in fit(model, callbacks=[schedule]).items()}


def evaluated_first():
    """All of Keras's methods before ``fit``, and with fewer rows than a batch, or one."""
    model, (x, y, w) = classifier(weighted_metrics=["accuracy"]), numbers()
    seen = {"before": model.evaluate(x, y, BATCH, 0, w)}
    for rows in (1, 3, 21):
        seen[f"predicted {rows}"] = model.predict(x[:rows], BATCH, verbose=0)
    seen["before, 3 rows"] = model.evaluate(x[:3], y[:3], BATCH, 0)
    seen |= fit(model, validation_split=0.2, class_weight={0: 0.2, 1: 3.0, 2: 1.0})
    return model, seen | {"after": model.evaluate(x, y, BATCH, 0, w)}


def several_steps():
    """Several steps in one execution, whose number does not divide those of an epoch."""
    model = classifier(steps_per_execution=4)
    x, y, _ = numbers()
    seen = fit(model, validation_data=(x[:21], y[:21]))
    return model, seen | {"predicted": model.predict(x, BATCH, verbose=0)}


def nested():
    """A model as a layer of a model, called twice: a siamese net."""
    encoder = keras.Sequential(
        [keras.Input([3]), layers.Dense(12, "tanh", name="up"), layers.Dense(8, name="down")],
        name="encoder",
    )
    inputs = keras.Input([FEATURES])
    one, other = encoder(inputs[:, :3]), encoder(inputs[:, 3:])
    x = layers.Lambda(lambda pair: ops.abs(pair[0] - pair[1]))([one, other])
    x = layers.Dense(5, "tanh", name="head")(x)
    model = keras.Model(inputs, layers.Dense(CLASSES, name="last")(x))
    model.compile("adam", crossentropy())
    return model, fit(model)


def frozen():
    """Transfer learning: frozen layers, compiled again when they thaw."""
    model = classifier()
    model.get_layer("up").trainable = False
    model.compile(keras.optimizers.Adam(0.01), crossentropy())
    seen = {f"frozen {k}": v for k, v in fit(model).items()}
    model.get_layer("up").trainable = True
    model.compile(keras.optimizers.Adam(0.001), crossentropy(), metrics=["accuracy"])
    return model, seen | fit(model)


def features():
    """A model that shares the layers of a trained one, as feature extractors do."""
    model = classifier()
    seen = fit(model)
    part = keras.Model(model.inputs, model.get_layer("down").output)
    x, _, _ = numbers()
    seen["features"] = part.predict(x, BATCH, verbose=0)
    return model, seen | {"called": np.asarray(model(x[:4]))}


def files():
    """Plain Keras reads a model and its weights, and exports what it has read."""
    model, (x, _, _) = classifier(), numbers()
    seen = fit(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        model.save_weights(f"{folder}/model.weights.h5")
        loaded = plainly(keras.models.load_model, f"{folder}/model.keras")
        plainly(loaded.export, f"{folder}/exported", verbose=False)
        again = keras.models.load_model(f"{folder}/model.keras")
        other = keras.models.clone_model(loaded)
        other.load_weights(f"{folder}/model.weights.h5")
        exported = plainly(tf.saved_model.load, f"{folder}/exported")
        served = plainly(exported.serve, x)
    found = {f"loaded {i}": w for i, w in enumerate(loaded.get_weights())}
    found |= {f"state {i}": np.asarray(v) for i, v in enumerate(loaded.optimizer.variables)}
    found |= {f"weights {i}": w for i, w in enumerate(other.get_weights())}
    more = {f"again {name}": value for name, value in fit(again).items()}
    return model, seen | found | more | {"served": served}


def resumed():
    """A training that is interrupted after an epoch, and goes on in another model."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptedError

    with tempfile.TemporaryDirectory() as folder:
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        with contextlib.suppress(InterruptedError):
            fit(classifier(), epochs=4, callbacks=[backup, Stop()])
        model = classifier()
        return model, fit(model, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(folder)])


def sequences():
    """Words of several lengths, with masks through recurrent layers and attention."""
    words = keras.Input([7], dtype="int32")
    x = layers.Embedding(9, 6, mask_zero=True, name="table")(words)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(8, name="hidden"))(x)
    x = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(x))
    x = layers.LSTM(5)(x)
    model = keras.Model(words, layers.Dense(CLASSES, name="last")(x))
    model.compile("adam", crossentropy())
    dice = np.random.default_rng(0)
    x = dice.integers(1, 9, (ROWS, 7)) * (np.arange(7) < dice.integers(1, 8, (ROWS, 1)))
    return model, fit(model, x, numbers()[1])


def translation():
    """An encoder gives its states to a decoder, which predicts a word for each position."""
    given, target = keras.Input([7], dtype="int32"), keras.Input([5], dtype="int32")
    x = layers.Embedding(9, 6, mask_zero=True, name="table")(given)
    _, *states = layers.LSTM(8, return_state=True)(x)
    x = layers.Embedding(9, 6)(target)
    x, *_ = layers.LSTM(8, return_sequences=True, return_state=True)(x, initial_state=states)
    x = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(x))
    model = keras.Model([given, target], layers.Dense(9, "softmax", name="last")(x))
    model.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    dice = np.random.default_rng(0)
    x = dice.integers(1, 9, (ROWS, 7)) * (np.arange(7) < dice.integers(1, 8, (ROWS, 1)))
    y = dice.integers(0, 9, (ROWS, 5))
    history = fit(model, [x, y], np.roll(y, -1, 1), sample_weight=(y > 3) * 1.0)
    return model, history | {"predicted": model.predict([x, y], BATCH, verbose=0)}


@keras.saving.register_keras_serializable("guides")
class Sampling(layers.Layer):
    """Sample of a distribution, with a loss for the distribution; the noise is no random number."""

    def call(self, inputs):
        mean, log_variance = inputs
        divergence = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
        self.add_loss(-0.05 * ops.mean(ops.sum(divergence, axis=1)))
        return mean + ops.exp(0.5 * log_variance) * ops.cos(7 * mean)


def variational():
    """An autoencoder of two models, whose encoder adds a loss."""
    inputs, code = keras.Input([FEATURES]), keras.Input([2])
    x = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(inputs))
    encoder = keras.Model(inputs, Sampling()([layers.Dense(2)(x), layers.Dense(2)(x)]))
    decoder = keras.Model(code, layers.Dense(FEATURES)(layers.Dense(8, "tanh")(code)))
    model = keras.Model(inputs, decoder(encoder(inputs)))
    model.compile("adam", "mse")
    x, _, _ = numbers()
    return model, fit(model, x, x, validation_data=(x[:9], x[:9]))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, place):
        return tuple(part[place * BATCH : (place + 1) * BATCH] for part in numbers())


def datasets():
    """Batches that an object makes, with weights of samples; rates that follow the loss."""
    how = {"steps_per_execution": 4, "jit_compile": False}
    model = classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), **how)
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0),
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.5, restore_best_weights=True),
    ]
    made = Batches(workers=1)
    how = {"validation_data": made, "callbacks": callbacks, "verbose": 0, "shuffle": False}
    return model, model.fit(made, epochs=4, **how).history


def attention():
    """Words of several lengths through attention, which takes the mask off what it reads."""
    words = keras.Input([6], dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True, name="table")(words)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, name="heads")(x, x)])
    up, down = layers.Dense(12, "tanh", name="up"), layers.Dense(8, name="down")
    x = layers.Add()([x, down(up(layers.LayerNormalization()(x)))])
    x = layers.Add()([x, down(up(x))])
    model = keras.Model(words, layers.Dense(CLASSES, name="last")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), crossentropy(), metrics=["accuracy"])
    dice = np.random.default_rng(0)
    x = dice.integers(1, 9, (ROWS, 6)) * (np.arange(6) < dice.integers(1, 7, (ROWS, 1)))
    return model, fit(model, x, x % CLASSES)


def sparse():
    """A bag of words as a sparse tensor."""
    inputs = keras.Input([20], sparse=True)
    x = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="last")(layers.ReLU()(x)))
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    dice = np.random.default_rng(0)
    x = dice.standard_normal((ROWS, 20)) * (dice.random((ROWS, 20)) < 0.2)
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), numbers()[1]))
    return model, model.fit(data.batch(BATCH), epochs=2, verbose=0).history


def texts():
    """Texts become numbers within the model."""
    look = layers.TextVectorization(output_sequence_length=4, vocabulary=["the", "cat", "sat"])
    inputs = keras.Input([], dtype="string")
    x = layers.Flatten()(layers.Embedding(6, 4)(look(inputs)))
    x = layers.Dense(8, name="down")(layers.Dense(12, "tanh", name="up")(x))
    model = keras.Model(inputs, layers.Dense(CLASSES, name="last")(x))
    model.compile("adam", crossentropy())
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "dog"], (ROWS, 4))
    rows = tf.constant([" ".join(row) for row in words])
    data = tf.data.Dataset.from_tensor_slices((rows, numbers()[1])).batch(BATCH)
    return model, model.fit(data, epochs=2, verbose=0).history


def images():
    """A U-shaped net of images that gives an image, with a loss of one's own."""
    x = inputs = keras.Input([6, 6, 2])
    x = skip = layers.Conv2D(4, 3, padding="same", activation="relu", name="up")(x)
    x = layers.Conv2D(6, 3, strides=2, padding="same", name="down")(x)
    x = layers.GroupNormalization(2)(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    x = layers.Concatenate()([x, skip])
    model = keras.Model(inputs, layers.Conv2D(1, 1, name="last")(x))

    def dice_loss(y, p):
        p = ops.sigmoid(p)
        both = ops.sum(y * p, (1, 2, 3))
        return 1 - (2 * both + 1) / (ops.sum(y + p, (1, 2, 3)) + 1)

    model.compile(keras.optimizers.RMSprop(0.01), dice_loss, metrics=["mae"])
    dice = np.random.default_rng(0)
    x = dice.standard_normal((ROWS, 6, 6, 2))
    return model, fit(model, x, (x[..., :1] > 0).astype("float64"))


class Errors(keras.metrics.Metric):
    """Metric of one's own, with a state of two numbers."""

    def __init__(self, name="errors", **more):
        super().__init__(name=name, **more)
        self.wrong = self.add_weight(shape=(2,), initializer="zeros", name="wrong")

    def update_state(self, y, p, sample_weight=None):
        labels = ops.cast(ops.reshape(y, [-1]), "int32")
        wrong = ops.cast(ops.cast(ops.argmax(p, -1), "int32") != labels, self.dtype)
        self.wrong.assign_add(ops.stack([ops.sum(wrong), ops.cast(ops.size(wrong), self.dtype)]))

    def result(self):
        return self.wrong[0] / self.wrong[1]


def metrics():
    loss = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="again")
    model = classifier(metrics=[Errors(), loss], weighted_metrics=["accuracy"])
    return model, fit(model, validation_split=0.3)


def batches():
    """``train_on_batch`` and its kin, also with fewer rows than microbatches."""
    model = classifier()
    return model, in_single_batches(model)


def averages():
    """Averages of weights that take their place at the end, and windows of gradients."""
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=None, gradient_accumulation_steps=3
    )
    model = classifier(optimizer=optimizer)
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    x, y, _ = numbers()
    return model, fit(model, epochs=3, callbacks=[swap], validation_data=(x, y))


PROGRAMS = {
    program.__name__: program
    for program in (
        several_inputs,
        own_layers,
        callbacks,
        rates,
        evaluated_first,
        several_steps,
        nested,
        frozen,
        features,
        files,
        resumed,
        sequences,
        translation,
        variational,
        datasets,
        attention,
        sparse,
        texts,
        images,
        metrics,
        batches,
        averages,
    )
}


def result(strategy, name):
    """Return what a program leaves: its numbers, and the weights and slots of its model."""
    keras.utils.set_random_seed(1)
    with doubles(), strategy.scope():
        model, found = PROGRAMS[name]()
        found |= {f"weight {i}": v.numpy() for i, v in enumerate(model.weights)}
        found |= {f"slot {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    return {k: np.asarray(v, "float64").tolist() for k, v in found.items()}
