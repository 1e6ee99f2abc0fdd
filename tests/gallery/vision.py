"""Models that look at images."""

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
    images,
    integers,
    random,
)

SIDE = 8
KINDS = 3


def _compiled(inputs, outputs, optimizer="adam", loss="sparse_categorical_crossentropy", **how):
    model = keras.Model(inputs, outputs)
    model.compile(optimizer, loss, **how)
    return model


def convolutional():
    image = keras.Input([SIDE, SIDE, 1])
    x = layers.Conv2D(4, 3, activation="relu")(image)
    x = layers.MaxPooling2D()(x)
    x = layers.Flatten()(x)
    return _compiled(image, layers.Dense(KINDS, activation="softmax")(x), metrics=["accuracy"])


def residual():
    """Blocks as in Xception: separable convolutions and batch normalization."""
    image = keras.Input([SIDE, SIDE, 1])
    x = layers.Conv2D(4, 3, padding="same")(image)
    x = layers.BatchNormalization()(x)
    first = x = layers.Activation("relu")(x)
    x = layers.SeparableConv2D(8, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = layers.add([x, layers.Conv2D(8, 1, strides=2, padding="same")(first)])
    x = layers.GlobalAveragePooling2D()(x)
    outputs = layers.Dense(KINDS, activation="softmax")(x)
    return _compiled(image, outputs, keras.optimizers.SGD(0.05, momentum=0.9))


def u_net():
    """Downwards and up again, with a class for each pixel."""
    image = keras.Input([SIDE, SIDE, 1])
    x = layers.Conv2D(4, 3, strides=2, padding="same")(image)
    x = layers.BatchNormalization()(x)
    beside = x = layers.Activation("relu")(x)
    x = layers.SeparableConv2D(8, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = layers.Conv2DTranspose(4, 3, padding="same")(layers.Activation("relu")(x))
    x = layers.UpSampling2D(2)(x)
    x = layers.UpSampling2D(2)(layers.add([x, beside]))
    outputs = layers.Conv2D(KINDS, 3, activation="softmax", padding="same")(x)
    return _compiled(image, outputs, keras.optimizers.SGD(0.05, momentum=0.9))


def super_resolution():
    image = keras.Input([None, None, 1])
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Conv2D(4, 3, padding="same")(x)
    return _compiled(image, layers.Lambda(lambda t: tf.nn.depth_to_space(t, 2))(x), loss="mse")


class Patches(layers.Layer):
    """Squares of an image, and where each lies: the same rows of a table for every image."""

    def __init__(self, size, width, **settings):
        super().__init__(**settings)
        self.size, self.count = size, (SIDE // size) ** 2
        self.project = layers.Dense(width)
        self.place = layers.Embedding(self.count, width)

    def call(self, image):
        patches = ops.image.extract_patches(image, size=self.size)
        patches = ops.reshape(patches, [-1, self.count, self.size**2])
        places = ops.expand_dims(ops.arange(self.count), 0)
        return self.project(patches) + self.place(places)


def vision_transformer():
    image = keras.Input([SIDE, SIDE, 1])
    x = Patches(4, 8)(image)
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(2, 4)(y, y), x])
    y = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.Dense(8, activation="gelu")(y), x])
    outputs = layers.Dense(KINDS)(layers.Flatten()(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return _compiled(image, outputs, keras.optimizers.AdamW(0.001, weight_decay=1e-4), loss)


def transfer_learning():
    """A base that was trained before: frozen at first, then trained with a small rate."""
    image = keras.Input([SIDE, SIDE, 1])
    base = keras.Sequential(
        [
            keras.Input([SIDE, SIDE, 1]),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
        ],
        name="base",
    )
    base.trainable = False
    x = layers.GlobalAveragePooling2D()(base(layers.Rescaling(2.0, -1)(image), training=False))
    return _compiled(image, layers.Dense(1)(x), loss=_binary(), metrics=["binary_accuracy"])


def _binary():
    return keras.losses.BinaryCrossentropy(from_logits=True)


def freeze_and_unfreeze(model):
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
    seen = dict(model.fit(images(), classes(2), **settings).history)
    model.get_layer("base").trainable = True
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.SGD(1e-3), _binary(), metrics=["binary_accuracy"])
    later = model.fit(images(), classes(2), **settings).history
    return seen | {f"later {name}": value for name, value in later.items()}


class Orthogonal(keras.regularizers.Regularizer):
    """Regularizer that keeps PointNet's transforms near to rotations."""

    def __init__(self, features, strength=0.001):
        self.features, self.strength = features, strength

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.features, self.features))
        products = ops.einsum("bij,bkj->bik", x, x)
        return ops.sum(self.strength * ops.square(products - ops.eye(self.features)))

    def get_config(self):
        return {"features": self.features, "strength": self.strength}


def point_net():
    """Points without an order, turned by a transform that the net finds itself."""
    points = keras.Input([6, 3])
    x = layers.Conv1D(4, 1, padding="valid")(points)
    x = layers.BatchNormalization(momentum=0.0)(x)
    x = layers.GlobalMaxPooling1D()(layers.Activation("relu")(x))
    bias = keras.initializers.Constant([1, 0, 0, 0, 1, 0, 0, 0, 1])
    turn = layers.Dense(
        9, kernel_initializer="zeros", bias_initializer=bias, activity_regularizer=Orthogonal(3)
    )(x)
    turned = layers.Dot(axes=(2, 1))([points, layers.Reshape([3, 3])(turn)])
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(4, 1)(turned))
    return _compiled(points, layers.Dense(KINDS, activation="softmax")(x), "sgd")


class Distiller(keras.Model):
    """A student that listens to a teacher as well as to the labels."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = _small(2), _small(4)
        self.teacher.trainable = False

    def compile(self, distillation_loss, **how):
        super().compile(**how)
        self.distillation_loss = distillation_loss

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        known = super().compute_loss(x, y, y_pred, sample_weight)
        taught = self.distillation_loss(
            ops.softmax(self.teacher(x, training=False) / 3), ops.softmax(y_pred / 3)
        )
        return 0.1 * known + 0.9 * 9 * taught

    def call(self, x):
        return self.student(x)


def _small(filters):
    return keras.Sequential(
        [
            keras.Input([SIDE, SIDE, 1]),
            layers.Conv2D(filters, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dense(KINDS),
        ]
    )


def distillation():
    model = Distiller()
    model.compile(
        distillation_loss=keras.losses.KLDivergence(),
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
    return model


class Siamese(keras.Model):
    """Three images at a time, and distances between what they are embedded as."""

    def __init__(self):
        super().__init__()
        self.embed = _small(2)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, images):
        anchor, alike, other = (self.embed(one) for one in images)
        near = ops.sum(ops.square(anchor - alike), axis=-1)
        return near, ops.sum(ops.square(anchor - other), axis=-1)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data[0])
        gradients = tape.gradient(loss, self.embed.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embed.trainable_weights))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self._loss(data[0]))
        return {"loss": self.tracker.result()}

    def _loss(self, images):
        near, far = self(images)
        return ops.mean(ops.maximum(near - far + 0.5, 0.0))


def siamese():
    model = Siamese()
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return model


class Contrastive(keras.Model):
    """Two views of each image: pairs are near, and all others of the batch are not."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = _small(2), layers.Dense(4)

    def compile(self, **how):
        super().compile(**how)
        self.tracker = keras.metrics.Mean(name="c_loss")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            a = ops.normalize(self.head(self.encoder(first, training=True)), axis=1)
            b = ops.normalize(self.head(self.encoder(second, training=True)), axis=1)
            alike = ops.matmul(a, ops.transpose(b)) / 0.1
            labels = ops.arange(ops.shape(a)[0])
            loss = keras.losses.sparse_categorical_crossentropy(labels, alike, from_logits=True)
            loss = ops.mean(loss)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


def contrastive():
    model = Contrastive()
    model.compile(optimizer="adam")
    return model


def three_images():
    return images(), images() ** 2, random(ROWS, SIDE, SIDE, 1, seed=9, low=0)


PROGRAMS = {
    "convolutional net": Program(convolutional, fit_and_judge(images, lambda: classes(KINDS))),
    "residual net": Program(residual, fit_and_judge(images, lambda: classes(KINDS))),
    "U-Net": Program(u_net, fit(images, lambda: integers(KINDS, ROWS, SIDE, SIDE))),
    "super-resolution": Program(super_resolution, fit_and_judge(images, lambda: images(16))),
    "vision transformer": Program(
        vision_transformer, fit_and_judge(images, lambda: classes(KINDS)), **KEYS
    ),
    "transfer learning": Program(transfer_learning, freeze_and_unfreeze),
    "point net": Program(
        point_net, fit_and_judge(lambda: random(ROWS, 6, 3), lambda: classes(KINDS))
    ),
    "distillation": Program(distillation, fit(images, lambda: classes(KINDS))),
    "siamese": Program(siamese, fit(three_images)),
    "contrastive": Program(
        contrastive,
        fit(images, lambda: images() ** 2),
        equal=False,
        why="a replica contrasts an image with the others that it holds, not with all of the batch",
    ),
}
