"""Models that pipelines train, and everything that a training shows."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import tfscale

layers = keras.layers


def perceptron():
    regular = keras.regularizers.L2(1e-2)
    sizes = [
        layers.Dense(9, "tanh", kernel_regularizer=regular, name=f"layer{i}") for i in range(4)
    ]
    return keras.Sequential([keras.Input((7,)), *sizes, layers.Dense(3, name="last")])


def residual():
    """Two tensors cross a cut, one of them a model's input for a later stage."""
    x = start = keras.Input((7,))
    skip = x = layers.Dense(8, "tanh", name="first")(x)
    for i in range(3):
        y = layers.Dense(8, "tanh", name=f"block{i}")(x)
        x = layers.Add()([x, y])
    x = layers.Concatenate()([x, skip, start])
    return keras.Model(start, layers.Dense(3, name="last")(layers.LayerNormalization()(x)))


def recurrent(dropout=0.0):
    start = keras.Input((7,))
    x = layers.SimpleRNN(6, return_sequences=True, dropout=dropout)(layers.Reshape((7, 1))(start))
    return keras.Model(start, layers.Dense(3, name="last")(layers.SimpleRNN(5)(x)))


@keras.saving.register_keras_serializable("pipeline")
class Tied(layers.Layer):
    """An embedding whose table also gives the logits."""

    def __init__(self, words, size, **more):
        super().__init__(**more)
        self.words, self.size = words, size

    def build(self, _):
        self.table = self.add_weight(shape=(self.words, self.size), name="table")

    def call(self, x, reverse=False):
        if reverse:
            return tf.matmul(x, self.table, transpose_b=True)
        return tf.gather(tf.convert_to_tensor(self.table), x)

    def compute_output_spec(self, x, reverse=False):
        last = (self.words,) if reverse else (self.size,)
        shape = (*x.shape[:-1], *last) if reverse else (*x.shape, *last)
        return keras.KerasTensor(shape, self.compute_dtype)

    def get_config(self):
        return {**super().get_config(), "words": self.words, "size": self.size}


def transformer():
    words = keras.Input((5,), dtype="int32")
    tied = Tied(11, 8, name="tied")
    x = tied(words)
    for i in range(2):
        y = layers.LayerNormalization(name=f"norm{i}")(x)
        y = layers.MultiHeadAttention(2, 4, name=f"attention{i}")(y, y)
        x = layers.Add()([x, y])
        y = layers.Dense(16, "gelu", name=f"up{i}")(x)
        x = layers.Add()([x, layers.Dense(8, name=f"down{i}")(y)])
    return keras.Model(words, tied(layers.GlobalAveragePooling1D()(x), reverse=True))


def normalized():
    """Statistics are of a microbatch, and dropout draws once for each microbatch."""
    x = start = keras.Input((7,))
    for i in range(3):
        x = layers.Dense(8, name=f"layer{i}")(x)
        x = layers.BatchNormalization(name=f"norm{i}")(x)
        x = layers.Dropout(0.25, seed=i)(layers.Activation("tanh")(x))
    return keras.Model(start, layers.Dense(3, name="last")(x))


def embedded():
    words = keras.Input((5,), dtype="int32")
    x = layers.Embedding(11, 6, name="embedding")(words)
    x = layers.Dense(6, "tanh", name="next")(layers.Flatten()(x))
    return keras.Model(words, layers.Dense(3, name="last")(x))


class Positions(layers.Layer):
    """A table whose rows are looked up once for all samples."""

    def build(self, shape):
        self.table = layers.Embedding(*shape[1:], name="positions")
        self.table.build(None)

    def call(self, x):
        return x + self.table(keras.ops.arange(x.shape[1]))


def lookups():
    """Two stages look up rows of one table; optimizers treat rows differently from their sum."""
    words = keras.Input((5,), dtype="int32")
    table = layers.Embedding(11, 6, name="table")
    x = Positions()(table(words))
    for name in ("next", "hidden", "deep"):
        x = layers.Dense(6, "tanh", name=name)(x)
    x = layers.Concatenate()([x, table(words)])
    return keras.Model(words, layers.Dense(3, name="last")(layers.GlobalAveragePooling1D()(x)))


class Microbatched(keras.Model):
    """One device that makes the passes of microbatches one after the other."""

    parts = 4

    def train_step(self, data):
        x, y = data
        rows, grads, outputs, losses = tf.shape(x)[0], None, [], []
        for i in range(self.parts):
            own = slice(i * rows // self.parts, (i + 1) * rows // self.parts)
            share = tf.cast(tf.shape(x[own])[0], x.dtype) / tf.cast(rows, x.dtype)
            with tf.GradientTape() as tape:
                outputs.append(self(x[own], training=True))
                losses.append(share * self.compute_loss(x[own], y[own], outputs[-1]))
            found = tape.gradient(losses[-1], self.trainable_variables)
            grads = found if grads is None else [a + b for a, b in zip(grads, found, strict=True)]
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self._loss_tracker.update_state(tf.add_n(losses), sample_weight=tf.shape(x)[0])
        return self.compute_metrics(x, y, tf.concat(outputs, 0))


def data(model, rows):
    draw = np.random.default_rng(0)
    words = model.inputs[0].dtype == "int32"
    x = (
        draw.integers(0, 11, (rows, 5))
        if words
        else draw.normal(size=(rows, 7)).astype(keras.config.floatx())
    )
    return x, draw.integers(0, 3, rows)


def compiled(model, optimizer, **more):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, metrics=["accuracy"], **more)
    return model


def trained(strategy, build, optimizer, epochs=2, batch=16, rows=58, oracle=None):
    """Return everything that a training shows, by name. The last batch has 10 rows."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = build()
        if strategy is None and oracle is not None:
            model = oracle(model.inputs, model.outputs)
        compiled(model, optimizer)
    x, y = data(model, rows)
    seen = []
    log = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: seen.append([logs[name] for name in sorted(logs)])
    )
    history = model.fit(
        x, y, batch, epochs, 0, [log], shuffle=False, validation_data=(x[:50], y[:50])
    )
    found = {f"{i} {v.name}": v.numpy() for i, v in enumerate(model.weights)}
    found |= {f"slot {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}
    found |= {f"history {name}": np.array(each) for name, each in history.history.items()}
    found["logs"] = np.array(seen)
    found["evaluate"] = np.array(model.evaluate(x, y, batch_size=batch, verbose=0))
    found["predict"] = model.predict(x, batch_size=batch, verbose=0)
    return model, found


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-2, global_clipnorm=0.05),
    "averages": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-2, clipnorm=0.05, use_ema=True, ema_overwrite_frequency=3
    ),
    "window": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "lamb": lambda: tfscale.optimizers.LAMB(0.01),
}
