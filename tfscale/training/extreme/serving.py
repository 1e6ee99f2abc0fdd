"""A SavedModel that answers with the best classes."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfscale.training.extreme.ensemble import Ensemble


def export(ensemble: Ensemble, k: int, path: str, input_signature: Any) -> None:
    """Write a SavedModel with the endpoint ``serve``, from inputs to ``scores`` and ``labels``.

    All operations are TensorFlow's own, so that TensorFlow Serving can load the model.
    """
    search, names = ensemble.search(), ensemble.labels.names
    candidates = search.candidates()
    texts = None if names is None else tf.constant(list(names))
    models = [heads.model for heads in ensemble.ready()]

    def serve(x: Any) -> dict[str, tf.Tensor]:
        scores, labels = search.best(ensemble.values_of(x), k, candidates)
        return {"scores": scores, "labels": labels if texts is None else tf.gather(texts, labels)}

    # Traced here, since Keras's archive knows no signature of sparse inputs.
    signature = [input_signature or _signature(models[0])]
    traced = tf.function(serve, input_signature=signature, autograph=False)
    traced.get_concrete_function()
    archive = keras.export.ExportArchive()
    for model in models:
        archive.track(model)
    archive.add_endpoint("serve", traced)
    archive.write_out(path, verbose=False)


def _signature(model: Any) -> Any:
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise ValueError("the models do not say what their inputs are; give input_signature")
    specs = keras.tree.map_structure(_spec, getattr(model, "input", inputs))
    return specs[0] if isinstance(specs, list) and len(specs) == 1 else specs


def _spec(each: Any) -> Any:
    kind = tf.SparseTensorSpec if getattr(each, "sparse", False) else tf.TensorSpec
    return kind(each.shape, each.dtype)
