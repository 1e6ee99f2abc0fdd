"""Gradients of a model's loss by its inputs, without any effect on the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.losses import compiled_loss
from tfscale.bridge.models import overrides
from tfscale.bridge.objects import build_on, layers_of, takes_training
from tfscale.bridge.stateless import regularized
from tfscale.training.adversarial.inputs import Inputs


def input_gradients(
    model: keras.Model, inputs: Inputs, y: Any, sample_weight: Any
) -> Callable[[list[Any]], list[Any]]:
    """Return a function that computes gradients of the compiled loss by the inputs.

    The function takes tensors that replace the inputs. It calls the model as in evaluation: dropout
    is off, and batch normalization uses its moving statistics. Assignments of layers, losses and
    metrics to their variables are dropped.
    """

    def gradients(moved: list[Any]) -> list[Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(moved)
            x = inputs.with_moved(moved)
            with keras.StatelessScope(regularized(model), collect_losses=True):
                predicted = model(x, **_evaluation(model))
                loss = model.compute_loss(x, y, predicted, sample_weight)
                if model.optimizer is not None:
                    # without it, half precision may round to 0
                    loss = model.optimizer.scale_loss(loss)
        found: list[Any] = tape.gradient(
            loss, moved, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return found

    return gradients


def _evaluation(model: keras.Model) -> dict[str, bool]:
    return {"training": False} if takes_training(model) else {}


def check(model: keras.Model) -> None:
    """Refuse a model without a loss."""
    if not overrides(model, "compute_loss") and compiled_loss(model) is None:
        raise ValueError(
            f"an attack raises the compiled loss, and {model.name!r} has none. Compile it with a "
            "loss, or give it a compute_loss(x, y, y_pred, sample_weight)"
        )


def build(model: keras.Model, data: Any) -> None:
    """Build what Keras would build in the first step, since an attack runs before that step.

    Args:
        model: a compiled model.
        data: a batch as ``train_step`` gets it.
    """
    losses = compiled_loss(model)
    layers = [model, *layers_of(model)]
    if all(layer.built for layer in layers) and (losses is None or losses.built):
        return
    if not tf.distribute.in_cross_replica_context() and tf.distribute.has_strategy():
        raise ValueError(
            f"{model.name!r} has to be built before an attack on several replicas: call it on a "
            "batch within the strategy's scope, or give it a keras.Input"
        )
    with tf.init_scope():
        build_on(model, data)
