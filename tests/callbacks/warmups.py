"""Small trainings for the tests of learning rates, and what can be seen of them."""

from __future__ import annotations

import keras
import numpy as np

from tfscale import schedules

BATCH, STEPS = 8, 6
RATE = 0.4

# Two and a half epochs up, then down to nothing in the fifth: no two steps have the same rate.
HILL = schedules.Cosine(RATE, end=5, warmup=2.5, start=0.05, unit="epochs")


def numbers(steps=STEPS):
    rng = np.random.default_rng(steps)
    x = rng.standard_normal((steps * BATCH, 3)).astype(np.float32)
    return x, x.sum(1, keepdims=True) + 0.1


def compiled(optimizer, **how):
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(4, activation="tanh")
    model = keras.Sequential([keras.Input([3]), hidden, keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **how)
    return model


def momentum(rate=RATE, **how):
    return keras.optimizers.SGD(rate, momentum=0.9, **how)


def fit(model, callbacks=(), epochs=4, steps=STEPS, **how):
    x, y = numbers(steps)
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "epochs": epochs, **how}
    return model.fit(x, y, callbacks=list(callbacks), **how)


class Seen(keras.callbacks.Callback):
    """Step and rate of each batch, as they are after it. Comes behind Warmup in the list."""

    def __init__(self):
        super().__init__()
        self.rates = {}

    def on_train_batch_end(self, batch, logs=None):
        optimizer = self.model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        step = int(optimizer.variables[0].numpy()) - 1  # batches, also where iterations are windows
        self.rates[step] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        assert logs["learning_rate"] == self.rates[step]


def rates(schedule, steps):
    """Return the rate that a schedule gives for each of some steps."""
    return {step: float(schedule(step)) for step in steps}


def bits(model):
    return [w.tobytes() for w in model.get_weights()]
