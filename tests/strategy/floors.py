"""``python -m tests.strategy.floors PROGRAM ...``: by how much one device differs from itself.

Trains programs of layouts.py in float32 with SGD, then again with other orders of the same sums:
rows of each batch reversed, and gradients of four microbatches added up. The largest differences
are floors: no grid, whose sums are in yet another order, can be held to less.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from tests.strategy import layouts
from tests.strategy.compare import largest_above_one, spread

MICROBATCHES = 4


class InMicrobatches(keras.Model):
    """Model whose step adds up the gradients of microbatches."""

    def train_step(self, data):
        x, y = data
        rows, grads, outputs, losses = tf.shape(y)[0], None, [], []
        for i in range(MICROBATCHES):
            own = slice(i * rows // MICROBATCHES, (i + 1) * rows // MICROBATCHES)
            with tf.GradientTape() as tape:
                outputs.append(self(x[own], training=True))
                loss = self.compute_loss(x[own], y[own], outputs[-1])
                loss *= tf.cast(tf.shape(y[own])[0] / rows, loss.dtype)
            losses.append(loss)
            found = map(tf.convert_to_tensor, tape.gradient(loss, self.trainable_variables))
            grads = [*found] if grads is None else [a + b for a, b in zip(grads, found)]
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self._loss_tracker.update_state(tf.add_n(losses), sample_weight=rows)
        return self.compute_metrics(x, y, tf.concat(outputs, 0))


def trained(program, reverses=False, kind=None):
    """Return the weights and the predictions of a trained program, by name."""
    keras.utils.set_random_seed(1)
    model = layouts.PROGRAMS[program]()
    model = kind(model.inputs, model.outputs[0]) if kind else model
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(layouts.OPTIMIZERS["sgd"](), loss)
    x, y = layouts.data(model)
    rows = np.arange(len(x))
    if reverses:
        batches = np.split(rows, range(layouts.BATCH, len(x), layouts.BATCH))
        rows = np.concatenate([batch[::-1] for batch in batches])
    model.fit(x[rows], y[rows], layouts.BATCH, layouts.EPOCHS, 0, shuffle=False)
    weights = {f"weight {i}": v.numpy() for i, v in enumerate(model.weights)}
    return weights, model.predict(x[:21], layouts.BATCH, verbose=0)


def main(programs):
    for program in programs:
        weights, predicted = trained(program)
        print(f"{program}: predictions of at most {np.abs(predicted).max():.2g}")
        orders = {"rows reversed": {"reverses": True}, "microbatches": {"kind": InMicrobatches}}
        for name, order in orders.items():
            others, again = trained(program, **order)
            far = max(spread(w, others[key], lambda _: 1) for key, w in weights.items())
            off = np.abs(again - predicted).max()
            share = spread(predicted, again, largest_above_one)
            print(f"  {name}: weights {far:.1e}, predictions {off:.1e}, or {share:.1e} of scale")


if __name__ == "__main__":
    main(sys.argv[1:] or layouts.PROGRAMS)
