"""Models of images, sequences and volumes, for the tests of domain parallelism."""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, optimizers


def plain():
    """Return a convolutional network: strides, dilation, pooling, dropout, both paddings."""
    inputs = keras.Input((13, 10, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv1")(inputs)
    x = layers.MaxPooling2D(3, 2, padding="same")(x)
    x = layers.Conv2D(5, (5, 3), padding="same", dilation_rate=(2, 1), name="conv2")(x)
    x = layers.Activation("tanh")(x)
    x = layers.Conv2D(5, 3, strides=2, padding="same", name="conv3")(x)
    x = layers.AveragePooling2D(2, 1, padding="same")(x)
    x = layers.Flatten()(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def residual():
    """Return a residual network with batch normalization."""
    inputs = keras.Input((12, 8, 2))
    x = layers.ZeroPadding2D(1)(inputs)
    x = layers.Conv2D(4, 3, use_bias=False, name="conv0")(x)
    for block, stride in enumerate((1, 2)):
        y = layers.Conv2D(4 + 2 * block, 3, stride, "same", use_bias=False, name=f"conv{block}a")(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.Conv2D(4 + 2 * block, 3, padding="same", name=f"conv{block}b")(y)
        y = layers.BatchNormalization()(y)
        if stride > 1:
            x = layers.Conv2D(4 + 2 * block, 1, stride, name=f"conv{block}c")(x)
        x = keras.ops.relu(layers.Add()([x, y])) if block else keras.ops.relu(x + y)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def unet():
    """Return a U-Net: one class for each pixel."""
    inputs = keras.Input((12, 8, 2))
    first = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv1")(inputs)
    x = layers.MaxPooling2D(2)(first)
    second = layers.Conv2D(6, 3, padding="same", activation="relu", name="conv2")(x)
    x = layers.MaxPooling2D(2)(second)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="conv3")(x)
    x = layers.Conv2DTranspose(6, 3, 2, "same", name="conv4")(x)
    x = layers.Concatenate()([x, second])
    x = layers.SeparableConv2D(5, 3, padding="same", activation="relu", name="conv5")(x)
    x = layers.Conv2D(4, 3, padding="same", name="conv6")(layers.UpSampling2D(2)(x))
    x = layers.DepthwiseConv2D(3, padding="same", name="conv7")(layers.concatenate([x, first]))
    return keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax", name="conv8")(x))


def sequence():
    """Return a network of sequences: causal and transposed convolutions, cropping, dropout."""
    inputs = keras.Input((21, 3))
    x = layers.Conv1D(4, 3, padding="causal", dilation_rate=2, activation="gelu", name="conv1")(
        inputs
    )
    x = layers.SpatialDropout1D(0.2)(x)
    x = layers.AveragePooling1D(2, padding="same")(x)
    x = layers.Conv1DTranspose(4, 4, 3, name="conv2")(x)
    x = layers.Cropping1D((2, 3))(layers.LayerNormalization()(x))
    x = layers.Conv1D(4, 5, strides=3, name="conv3")(layers.Dropout(0.3)(x))
    x = layers.Dense(4, "relu")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def volume():
    """Return a network of volumes; TensorFlow pools no volumes of float64."""
    inputs = keras.Input((6, 9, 5, 2))
    x = layers.Conv3D(3, 3, padding="same", activation="relu", name="conv1")(inputs)
    x = layers.Conv3D(3, 2, 2, activation="tanh", name="conv_down")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Conv3D(3, (1, 3, 2), strides=(1, 2, 1), padding="same", name="conv2")(x)
    x = layers.UpSampling3D(2)(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def short():
    """Return two convolutions and a mean."""
    inputs = keras.Input((12, 10, 2))
    x = layers.Conv2D(4, 3, padding="same", name="conv1")(inputs)
    x = layers.Conv2D(4, 3, padding="same", name="conv2")(x)
    x = layers.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, layers.Dense(3, name="dense")(x))


def far():
    """Return a network whose kernel is larger than a slice, and whose last map is small."""
    inputs = keras.Input((8, 6, 2))
    x = layers.Conv2D(3, 3, padding="same", name="conv1")(inputs)
    x = layers.Conv2D(3, (7, 1), padding="same", name="conv2")(x)
    x = layers.MaxPooling2D(4, name="pool")(x)
    x = layers.Conv2D(3, 3, padding="same", name="conv3")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def mixed():
    """Return a network in which a function of its own turns images over, between convolutions."""
    inputs = keras.Input((9, 6, 2))
    x = layers.Conv2D(3, 3, padding="same", name="conv1")(inputs)
    x = layers.Lambda(lambda x: x[:, ::-1], name="lambda")(x)
    inner_inputs = keras.Input((9, 6, 3))
    y = layers.Conv2D(3, 3, padding="same", name="conv2")(inner_inputs)
    y = layers.Multiply()([y, layers.GlobalAveragePooling2D(keepdims=True)(y)])
    inner = keras.Model(inner_inputs, keras.ops.gelu(y))
    x = layers.Conv2D(3, 3, padding="same", name="other")(inner(x))
    x = layers.Conv2D(3, 3, padding="same", activation="tanh", name="conv3")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(x)))


class Block(layers.Layer):
    """Residual block whose activations and sums are functions."""

    def __init__(self, width, **more):
        super().__init__(**more)
        self.first = layers.Conv2D(width, 3, padding="same", name="conv_a")
        self.norm = layers.BatchNormalization()
        self.second = layers.Conv2D(width, 3, padding="same", name="conv_b")

    def call(self, x, training=None):
        y = keras.ops.relu(self.norm(self.first(x), training=training))
        return self.second(y) + x


class Subclassed(keras.Model):
    """Subclassed model of such blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = [Block(4), Block(4)]
        self.stem = layers.Conv2D(4, 3, padding="same", name="conv_stem")
        self.pool = layers.MaxPooling2D(2)
        self.out = layers.Dense(3)

    def call(self, x, training=None):
        x = self.pool(self.stem(x))
        for block in self.blocks:
            x = block(x, training=training)
        return self.out(keras.ops.mean(x, [1, 2]))

    sample = (12, 8, 2)


class OwnStep(Subclassed):
    """Model with a step of its own, whose loss reads activations in between."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            inner = self.blocks[0](self.pool(self.stem(x)), training=True)
            found = self.out(keras.ops.mean(self.blocks[1](inner, training=True), [1, 2]))
            loss = tf.reduce_mean(tf.square(found - y)) + 0.1 * tf.reduce_mean(tf.square(inner))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.01, epsilon=1e-4),
    "clipping": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
}


def made(strategy, program, optimizer="sgd", **more):
    """Return a compiled model; ``strategy`` may be None."""
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = program()
        model.compile(OPTIMIZERS[optimizer](), **({"loss": "mse", "metrics": ["mae"]} | more))
    return model


def data(model, rows):
    draw = np.random.default_rng(0)
    shape = getattr(model, "sample", None) or model.input_shape[1:]
    outputs = (3,) if hasattr(model, "sample") else model.output_shape[1:]
    return draw.standard_normal((rows, *shape)), draw.standard_normal((rows, *outputs))


def numbers(model):
    return [np.array(v.numpy()) for v in (*model.weights, *model.optimizer.variables)]


def trained(model, epochs=2, rows=22):
    """Return all numbers that a training leaves or shows."""
    x, y = data(model, rows)
    own = {"validation_data": (x[:10], y[:10]), "validation_batch_size": 7, "verbose": 0}
    history = model.fit(x, y, 8, epochs, shuffle=False, **own).history
    shown = [*history.values(), model.evaluate(x, y, 15, verbose=0)]
    return [*numbers(model), *map(np.array, shown), model.predict(x, 15, verbose=0)]
