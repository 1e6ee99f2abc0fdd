"""Models whose train steps apply gradients several times: GANs as in the examples of keras.io."""

import keras
import numpy as np
import tensorflow as tf

from tests.recompute.models import rewritten

layers = keras.layers

LATENT = 4


def discriminator():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Dropout(0.2),
            layers.Conv2D(8, 3, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def generator():
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 4, use_bias=False),
            layers.BatchNormalization(),
            layers.Reshape((4, 4, 4)),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class Adversaries(keras.Model):
    """Two networks, each with an optimizer. ``fit`` may give it images alone."""

    def __init__(self):
        super().__init__()
        self.discriminator, self.generator = discriminator(), generator()
        self.seeds = keras.random.SeedGenerator(11)
        self.d_optimizer = keras.optimizers.Adam(1e-3)
        self.g_optimizer = keras.optimizers.Adam(1e-3)

    def noise(self, like):
        return keras.random.normal((keras.ops.shape(like)[0], LATENT), seed=self.seeds)


class Gan(Adversaries):
    """The step of "GAN overriding Model.train_step": two forward passes and two updates."""

    def train_step(self, real):
        fake = self.generator(self.noise(real))
        both = keras.ops.concatenate([fake, real], axis=0)
        labels = keras.ops.concatenate([keras.ops.ones_like(fake[:, 0, 0]), real[:, 0, 0] * 0], 0)
        with tf.GradientTape() as tape:
            d_loss = cross_entropy(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(self.noise(real)))
            g_loss = cross_entropy(keras.ops.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        return {"loss": g_loss, "d_loss": d_loss}


class WassersteinGan(Adversaries):
    """The step of "WGAN-GP overriding Model.train_step": three updates, and a gradient penalty."""

    def penalty(self, real, fake):
        alpha = keras.random.normal((keras.ops.shape(real)[0], 1, 1, 1), seed=self.seeds)
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.discriminator(between, training=True)
        slope = tape.gradient(judged, [between])[0]
        norm = keras.ops.sqrt(keras.ops.sum(keras.ops.square(slope), axis=[1, 2, 3]) + 1e-9)
        return keras.ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        for _ in range(2):
            noise = self.noise(real)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                d_loss = self.penalty(real, fake) * 10.0
                d_loss += keras.ops.mean(self.discriminator(fake, training=True))
                d_loss -= keras.ops.mean(self.discriminator(real, training=True))
            weights = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        noise = self.noise(real)
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            g_loss = -keras.ops.mean(self.discriminator(fake, training=True))
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        return {"loss": g_loss, "d_loss": d_loss}


class OneForwardPass(Adversaries):
    """The step of TensorFlow's DCGAN: one forward pass, two gradients, and then two updates."""

    def train_step(self, real):
        with tf.GradientTape(persistent=True) as tape:
            judged = self.discriminator(self.generator(self.noise(real), training=True))
            judged_real = self.discriminator(real)
            g_loss = cross_entropy(keras.ops.ones_like(judged), judged)
            d_loss = cross_entropy(keras.ops.zeros_like(judged), judged)
            d_loss += cross_entropy(keras.ops.ones_like(judged_real), judged_real)
        for_g, for_d = self.generator.trainable_weights, self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, for_d), for_d)
        self.g_optimizer.apply(tape.gradient(g_loss, for_g), for_g)
        return {"loss": g_loss, "d_loss": d_loss}


class Together(Adversaries):
    """One backward pass, whose gradients two optimizers apply, by ``apply``."""

    def train_step(self, real):
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(self.noise(real), training=True))
            loss = cross_entropy(keras.ops.ones_like(judged), judged)
        for_g, for_d = self.generator.trainable_weights, self.discriminator.trainable_weights
        gradients = tape.gradient(loss, [*for_d, *for_g])
        self.d_optimizer.apply(gradients[: len(for_d)], for_d)
        self.g_optimizer.apply(gradients[len(for_d) :], for_g)
        return {"loss": loss}


def cross_entropy(labels, judged):
    return keras.ops.mean(keras.losses.binary_crossentropy(labels, judged, from_logits=True))


def train(kind, callback=None, scope=None, batch=8, **settings):
    """All bits of a model and its optimizers after a training, and the losses."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with (scope or tf.distribute.get_strategy()).scope():
        model = kind()
        model.compile(**settings)
    images = np.random.default_rng(0).random((16, 8, 8, 1), np.float32)
    callbacks = [callback] if callback else []
    history = model.fit(images, batch_size=batch, epochs=2, verbose=0, callbacks=callbacks)
    optimizers = (model.d_optimizer, model.g_optimizer)
    every = [*model.variables, *(v for one in optimizers for v in one.variables)]
    return [v.numpy().tobytes() for v in every], history.history


def assert_same_training(kind, callback, **settings):
    plain = train(kind, **settings)
    with rewritten():
        assert train(kind, callback, **settings) == plain
    assert callback.plan.again
    return callback.plan
