"""Models that make data: their ``train_step`` is their own, and so are their losses.

What they draw at random comes with the data here, or no two trainings would be the same.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers, ops

from tests.gallery.parts import ROWS, Program, fit, images, random

SIDE = 8
LATENT = 2


class Sampling(layers.Layer):
    """A point near the mean, as far away as the noise says."""

    def call(self, inputs):
        mean, log_variance, noise = inputs
        return mean + ops.exp(0.5 * log_variance) * noise


class VariationalAutoencoder(keras.Model):
    """No ``call``, a loss of sums and means, and a metric for each of its terms."""

    def __init__(self):
        super().__init__()
        image, noise = keras.Input([SIDE, SIDE, 1]), keras.Input([LATENT])
        x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
        x = layers.Dense(8, activation="relu")(layers.Flatten()(x))
        mean, log_variance = layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)
        z = Sampling()([mean, log_variance, noise])
        self.encoder = keras.Model([image, noise], [mean, log_variance, z])
        self.decoder = keras.Sequential(
            [
                keras.Input([LATENT]),
                layers.Dense(4 * 4 * 4, activation="relu"),
                layers.Reshape([4, 4, 4]),
                layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same"),
                layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same"),
            ]
        )
        self.total_tracker = keras.metrics.Mean(name="total")
        self.divergence_tracker = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self):
        return [self.total_tracker, self.divergence_tracker]

    def train_step(self, data):
        image, noise = data
        with tf.GradientTape() as tape:
            mean, log_variance, z = self.encoder([image, noise])
            made = self.decoder(z)
            error = keras.losses.binary_crossentropy(image, made)
            error = ops.mean(ops.sum(error, axis=(1, 2)))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = error + divergence
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        self.total_tracker.update_state(total)
        self.divergence_tracker.update_state(divergence)
        return {
            "total": self.total_tracker.result(),
            "divergence": self.divergence_tracker.result(),
        }


def variational_autoencoder():
    model = VariationalAutoencoder()
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return model


def _discriminator(last=None):
    return keras.Sequential(
        [
            keras.Input([SIDE, SIDE, 1]),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1, activation=last),
        ],
        name="discriminator",
    )


def _generator(batch_norm=False):
    return keras.Sequential(
        [
            keras.Input([LATENT]),
            layers.Dense(4 * 4 * 4),
            *([layers.BatchNormalization()] if batch_norm else []),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape([4, 4, 4]),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            *([layers.BatchNormalization()] if batch_norm else []),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class Gan(keras.Model):
    """Two optimizers, a compiled loss object, and labels for twice as many images as rows."""

    def __init__(self):
        super().__init__()
        self.discriminator = _discriminator("sigmoid")
        self.generator = _generator(batch_norm=True)
        self.d_tracker = keras.metrics.Mean(name="d_loss")
        self.g_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_tracker, self.g_tracker]

    def train_step(self, data):
        real, noise = data
        rows = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        both = ops.concatenate([self.generator(noise, training=True), real], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            forged = self.discriminator(self.generator(noise, training=True))
            g_loss = self.loss_fn(ops.zeros((rows, 1)), forged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def gan():
    model = Gan()
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.5),
        keras.optimizers.SGD(0.05, momentum=0.5),
        keras.losses.BinaryCrossentropy(),
    )
    return model


class WassersteinGan(keras.Model):
    """The critic learns several times a step, and its loss has a gradient in it."""

    def __init__(self):
        super().__init__()
        self.critic = _discriminator()
        self.generator = _generator()

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def penalty(self, real, forged, alpha):
        between = real + alpha * (forged - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between, training=True)
        slope = tape.gradient(judged, between)
        length = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=[1, 2, 3]) + 1e-12)
        return tf.reduce_mean((length - 1.0) ** 2)

    def train_step(self, data):
        real, noise, alpha = data[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                forged = self.generator(noise, training=True)
                d_loss = tf.reduce_mean(self.critic(forged, training=True))
                d_loss -= tf.reduce_mean(self.critic(real, training=True))
                d_loss += 10.0 * self.penalty(real, forged, alpha)
            weights = self.critic.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wasserstein_gan():
    model = WassersteinGan()
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01))
    return model


class Diffusion(keras.Model):
    """A network and its moving average; the loss is a compiled one, called directly."""

    def __init__(self):
        super().__init__()
        image, level = keras.Input([SIDE, SIDE, 1]), keras.Input([1, 1, 1])
        wide = layers.UpSampling2D(SIDE)(level)
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(
            layers.Concatenate()([image, wide])
        )
        x = layers.BatchNormalization(center=False, scale=False)(x)
        out = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
        self.normalizer = layers.Normalization()
        self.network = keras.Model([image, level], out)
        self.average = keras.models.clone_model(self.network)
        self.average.set_weights(self.network.get_weights())

    def compile(self, **settings):
        super().compile(**settings)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")

    @property
    def metrics(self):
        return [self.noise_tracker]

    def train_step(self, data):
        image, noise, level = data[0]
        image = self.normalizer(image, training=True)
        noisy = ops.sqrt(1 - level) * image + ops.sqrt(level) * noise
        with tf.GradientTape() as tape:
            guess = self.network([noisy, level], training=True)
            loss = self.loss(noise, guess)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_tracker.update_state(loss)
        for weight, average in zip(self.network.weights, self.average.weights):
            average.assign(0.9 * average + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


def diffusion():
    model = Diffusion()
    model.normalizer.adapt(images())
    model.compile(
        optimizer=keras.optimizers.AdamW(0.001, weight_decay=1e-4, epsilon=1e-3),
        loss=keras.losses.mean_absolute_error,
    )
    return model


def autoencoder():
    image = keras.Input([SIDE, SIDE, 1])
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(x)
    model = keras.Model(image, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x))
    model.compile("adam", "binary_crossentropy")
    return model


class Codebook(layers.Layer):
    """Layer that replaces a vector by the nearest code, and passes gradients unchanged.

    Its two losses, of the codes and of what is to stay near them, are means over places.
    """

    def __init__(self, codes, length):
        super().__init__()
        start = keras.initializers.RandomUniform(-0.5, 0.5, seed=1)
        self.codes = self.add_weight(shape=(codes, length), initializer=start)

    def call(self, inputs):
        distances = ops.sum((inputs[..., None, :] - self.codes) ** 2, -1)
        found = ops.take(self.codes, ops.argmin(distances, -1), axis=0)
        self.add_loss(ops.mean((found - ops.stop_gradient(inputs)) ** 2))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(found) - inputs) ** 2))
        return inputs + ops.stop_gradient(found - inputs)


class QuantizingAutoencoder(keras.Model):
    """VQ-VAE: a loss of its own, of the images' variance, beside those of a layer."""

    def __init__(self):
        super().__init__()
        image, code = keras.Input([SIDE, SIDE, 1]), keras.Input([4, 4, 3])
        x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image)
        self.encoder = keras.Model(image, layers.Conv2D(3, 1)(x))
        self.codebook = Codebook(8, 3)
        x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(code)
        self.decoder = keras.Model(code, layers.Conv2D(1, 3, padding="same")(x))
        self.tracker = keras.metrics.Mean(name="error")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, image):
        return self.decoder(self.codebook(self.encoder(image)))

    def train_step(self, image):
        with tf.GradientTape() as tape:
            error = ops.mean((image - self(image, training=True)) ** 2) / 0.3
            total = error + sum(self.losses)
        gradients = tape.gradient(total, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.tracker.update_state(error)
        return {"error": self.tracker.result()}


def quantizing_autoencoder():
    model = QuantizingAutoencoder()
    model.compile(optimizer=keras.optimizers.Adam(epsilon=1e-3))
    return model


def noise():
    return random(ROWS, LATENT, seed=3)


def between():
    return random(ROWS, 1, 1, 1, seed=4, low=0)


PROGRAMS = {
    "autoencoder": Program(autoencoder, fit(images, images)),
    "variational autoencoder": Program(variational_autoencoder, fit(images, noise)),
    "quantizing autoencoder": Program(quantizing_autoencoder, fit(images)),
    "GAN": Program(gan, fit(images, noise)),
    "Wasserstein GAN": Program(wasserstein_gan, fit(lambda: (images(), noise(), between()))),
    "diffusion": Program(
        diffusion,
        fit(lambda: (images(), random(ROWS, SIDE, SIDE, 1, seed=5), between())),
        own_losses="sum",
    ),
}
