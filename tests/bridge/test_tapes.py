"""Tapes that give other gradients: they are called as TensorFlow's documentation calls them."""

import pytest
import tensorflow as tf

from tfscale.bridge.tapes import gradients_changed, inner_gradients_changed


def doubled(gradients, sources):
    return [2 * g for g in gradients]


CHANGES = {
    "of a step": lambda: gradients_changed(doubled, lambda target, sources: 5 * target),
    "within a step": lambda: inner_gradients_changed(
        lambda target, sources, is_inner: 5 * target, doubled, by_tensors=True
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tape_takes_its_arguments_by_name(change):
    x = tf.constant(3.0)
    with CHANGES[change](), tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    with CHANGES[change]():
        assert float(tape.gradient(target=y, sources=x)) == 2 * 5 * 6
