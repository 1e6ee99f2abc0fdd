"""Checks of random layers, for any layout: a function of a strategy and a folder each."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.strategy.models import BATCH, numbers

WIDTH = 4000  # masks of so many numbers agree in a half of them, give or take 5%


def masks_seen_by_gradients(strategy):
    """Mean over replicas of the masks in one step of ``fit``: 0, or 2 where all of them keep."""
    with strategy.scope():
        inputs = keras.Input([WIDTH])
        hidden = layers.Dropout(0.5)(inputs)
        outputs = layers.Dense(1, use_bias=False, kernel_initializer="zeros")(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(1.0), lambda y, predicted: predicted)
    rows = strategy.num_replicas_in_sync
    model.fit(np.ones([rows, WIDTH]), np.zeros([rows, 1]), batch_size=rows, verbose=0)
    return -model.get_weights()[0]


def masks_in_fit_are_independent(strategy, folder):
    mean = masks_seen_by_gradients(strategy)
    replicas = strategy.num_replicas_in_sync
    for kept in range(replicas + 1):
        share = np.mean(np.isclose(mean, 2 * kept / replicas))
        expected = tf.exp(
            tf.math.lgamma(replicas + 1.0)
            - tf.math.lgamma(kept + 1.0)
            - tf.math.lgamma(replicas - kept + 1.0)
        ) / (2**replicas)
        assert abs(share - expected) < 0.05, (kept, share, float(expected))


def masks_in_run_are_independent(strategy, folder):
    with strategy.scope():
        layer = layers.Dropout(0.5)
    ones = tf.ones([WIDTH])
    masks = strategy.gather(strategy.run(lambda: layer(ones, training=True)[None]), axis=0)
    for i in range(len(masks)):
        for j in range(i):
            agree = np.mean(masks[i].numpy() == masks[j].numpy())
            assert abs(agree - 0.5) < 0.05, (i, j, agree)


def tensorflows_numbers_are_independent(strategy, folder):
    """A step draws by ``tf.random`` itself, as diffusion and variational autoencoders do."""
    keras.utils.set_random_seed(1)
    run = tf.function(lambda: strategy.run(lambda: tf.random.uniform([1, 8])))
    drawn = strategy.gather(run(), axis=0).numpy()
    assert len({row.tobytes() for row in drawn}) == strategy.num_replicas_in_sync


def noisy(strategy, seed):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        inputs = keras.Input([6])
        hidden = layers.GaussianNoise(0.1)(layers.Dense(8, activation="tanh")(inputs))
        model = keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.3)(hidden)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def train(model, epochs=2):
    x, y = numbers()
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    return [w.tobytes() for w in model.get_weights()]


def the_seed_decides(strategy, folder):
    first = train(noisy(strategy, 1))
    assert train(noisy(strategy, 1)) == first
    assert train(noisy(strategy, 2)) != first


def restored(strategy, folder, checkpoint):
    """Whether a checkpoint brings another model to where the first one was."""
    model = noisy(strategy, 1)
    train(model)
    path = checkpoint(model).save(str(folder / "saved"))
    expected = train(model)

    other = noisy(strategy, 2)
    train(other, 1)
    checkpoint(other).restore(path).assert_consumed()
    return train(other) == expected


def a_checkpoint_restores_the_seeds(strategy, folder):
    """Keras alone leaves them out of a checkpoint, on one device too."""
    assert restored(
        strategy,
        folder,
        lambda model: tf.train.Checkpoint(model=model, optimizer=model.optimizer),
    )


def a_checkpoint_of_the_seeds_restores_them(strategy, folder):
    """Name seeds one by one, as on one device."""

    def checkpoint(model):
        seeds = [v.value for v in model.variables if v.name == "seed_generator_state"]
        assert len(seeds) == 2
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer, seeds=seeds)

    assert restored(strategy, folder, checkpoint)


def an_exported_model_is_read_in_the_scope(strategy, folder):
    model = noisy(strategy, 1)
    train(model)
    model.export(folder / "exported", verbose=False)
    with strategy.scope():
        loaded = tf.saved_model.load(str(folder / "exported"))
    x = numbers()[0]
    expected = model.predict(x, batch_size=len(x), verbose=0)
    np.testing.assert_allclose(loaded.serve(x), expected, atol=1e-6)


CHECKS = {
    check.__name__: check
    for check in (
        masks_in_fit_are_independent,
        masks_in_run_are_independent,
        tensorflows_numbers_are_independent,
        the_seed_decides,
        a_checkpoint_restores_the_seeds,
        a_checkpoint_of_the_seeds_restores_them,
        an_exported_model_is_read_in_the_scope,
    )
}
