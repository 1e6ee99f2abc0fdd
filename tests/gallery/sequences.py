"""Models that read texts, sounds and time series."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from tests.gallery.parts import (
    KEYS,
    ROWS,
    Program,
    classes,
    fit,
    fit_and_judge,
    integers,
    random,
)

WORDS, LENGTH, WIDTH, KINDS = 20, 6, 8, 3


def texts():
    """Words, and zeros behind them; each text has another length."""
    words = integers(WORDS, ROWS, LENGTH, low=1)
    ends = integers(LENGTH + 1, ROWS, 1, seed=1, low=2)
    return words * (keras.ops.convert_to_numpy(ops.arange(LENGTH)) < ends)


class TokenAndPosition(layers.Layer):
    """Words and places, both looked up."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.token = layers.Embedding(WORDS, WIDTH, mask_zero=True)
        self.position = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return self.token.compute_mask(x)


def _block(x, causal=False):
    attended = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=causal)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, attended]))
    y = layers.Dense(WIDTH)(layers.Dense(WIDTH, activation="relu")(x))
    return layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, y]))


def text_transformer():
    words = keras.Input([LENGTH], dtype="int32")
    x = layers.GlobalAveragePooling1D()(_block(TokenAndPosition()(words)))
    model = keras.Model(words, layers.Dense(KINDS, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def small_gpt():
    """Two outputs, of which one alone has a loss; each text is its own target."""
    words = keras.Input([LENGTH], dtype="int32")
    x = _block(TokenAndPosition()(words), causal=True)
    model = keras.Model(words, [layers.Dense(WORDS)(x), x])
    known = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=[known, None])
    return model


def bidirectional():
    words = keras.Input([None], dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Bidirectional(layers.LSTM(4))(x)
    model = keras.Model(words, layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def translation():
    """An encoder whose last state begins a decoder."""
    heard = keras.Input([None, 5])
    _, *state = layers.LSTM(4, return_state=True)(heard)
    said = keras.Input([None, 3])
    spoken, _, _ = layers.LSTM(4, return_sequences=True, return_state=True)(
        said, initial_state=state
    )
    model = keras.Model([heard, said], layers.Dense(3, activation="softmax")(spoken))
    model.compile("rmsprop", "categorical_crossentropy", metrics=["accuracy"])
    return model


def one_hot(seed):
    return keras.ops.convert_to_numpy(ops.one_hot(integers(3, ROWS, LENGTH, seed=seed), 3))


class CtcLayer(layers.Layer):
    """Keras's example of captcha readers: a layer that adds the loss, and passes on its input."""

    def call(self, y_true, y_pred):
        rows, steps = ops.shape(y_true)[0], ops.shape(y_pred)[1]
        known = ops.full([rows], ops.shape(y_true)[1], dtype="int32")
        loss = ops.ctc_loss(y_true, y_pred, known, ops.full([rows], steps, dtype="int32"))
        self.add_loss(ops.mean(loss))
        return y_pred


def captcha():
    image, labels = keras.Input([LENGTH, 4, 1], name="image"), keras.Input([2], name="label")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(layers.Reshape([LENGTH, 16])(x))
    outputs = CtcLayer()(ops.cast(labels, "int32"), layers.Dense(5)(x))
    model = keras.Model([image, labels], outputs)
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return model


def captchas():
    return {"image": random(ROWS, LENGTH, 4, 1), "label": integers(5, ROWS, 2, low=1)}


def forecast():
    """Windows of a time series that a dataset cuts."""
    inputs = keras.Input([LENGTH, 2])
    x = layers.Conv1D(4, 3, padding="causal", activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(4)(x)))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def windows():
    series = random(ROWS + LENGTH - 1, 2)
    return keras.utils.timeseries_dataset_from_array(
        series[:, :], series[LENGTH - 1 :, 0], sequence_length=LENGTH, batch_size=8
    )


def anomalies():
    """A convolutional autoencoder of a series, with dropout that is switched off."""
    inputs = keras.Input([8, 1])
    x = layers.Conv1D(4, 3, padding="same", strides=2, activation="relu")(inputs)
    x = layers.Dropout(0.0)(x)
    x = layers.Conv1DTranspose(4, 3, padding="same", strides=2, activation="relu")(x)
    model = keras.Model(inputs, layers.Conv1DTranspose(1, 3, padding="same")(x))
    model.compile(keras.optimizers.Adam(0.001), "mse")
    return model


class MaskedLanguageModel(keras.Model):
    """Words that are hidden are to be found: a loss of its own with weights, by a loss object."""

    def compile(self, **how):
        super().compile(**how)
        self.find = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        words, hidden, weights = data
        with tf.GradientTape() as tape:
            loss = self.find(hidden, self(words, training=True), sample_weight=weights)
            loss = ops.mean(loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def masked_language_model():
    words = keras.Input([LENGTH], dtype="int32")
    model = MaskedLanguageModel(words, layers.Dense(WORDS)(_block(TokenAndPosition()(words))))
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


PROGRAMS = {
    "text transformer": Program(
        text_transformer, fit_and_judge(texts, lambda: classes(KINDS)), **KEYS
    ),
    "small GPT": Program(small_gpt, fit(texts, texts), **KEYS),
    "bidirectional LSTM": Program(bidirectional, fit_and_judge(texts, lambda: classes(2))),
    "translation": Program(
        translation, fit_and_judge(lambda: [random(ROWS, 4, 5), one_hot(1)], lambda: one_hot(2))
    ),
    "captcha": Program(captcha, fit(captchas)),
    "forecast": Program(forecast, fit(windows, batch_size=None)),
    "anomalies": Program(
        anomalies, fit_and_judge(lambda: random(ROWS, 8, 1), lambda: random(ROWS, 8, 1))
    ),
    "masked language model": Program(
        masked_language_model,
        fit(texts, texts, sample_weight=random(ROWS, LENGTH, low=0)),
    ),
}
