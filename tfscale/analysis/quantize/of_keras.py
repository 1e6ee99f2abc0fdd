"""Keras's own ``model.quantize``, driven by a plan."""

from __future__ import annotations

import logging
from typing import Any

import keras

from tfscale.analysis.quantize import graph
from tfscale.analysis.quantize.kernels import kernels_of
from tfscale.analysis.quantize.litert import NotExportableError
from tfscale.analysis.quantize.study import FLOAT
from tfscale.bridge.installed import refuse_keras_2
from tfscale.bridge.objects import copy_state
from tfscale.support import arguments

_LOG = logging.getLogger("tfscale")
_MODES = {8: "int8", 4: "int4"}
_LAYERS = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


def to_keras(plan: Any, model: Any, *, strict: bool = False) -> Any:
    """Return a copy that Keras has quantized; see ``Plan.to_keras``."""
    refuse_keras_2("plan.to_keras calls Keras 3's model.quantize")
    graph.check(model)
    strict = arguments.flag(strict, "strict")
    plan.check(model)
    kinds = {kernel.path: type(kernel.layer) for kernel in kernels_of(model)}
    wanted = {path: bits for path, bits in plan.bits.items() if bits != FLOAT}
    left = {
        path: bits
        for path, bits in wanted.items()
        if kinds[path] not in _LAYERS or bits not in _MODES
    }
    _tell({path: f"{kinds[path].__name__}, {bits} bits" for path, bits in left.items()}, strict)
    made = graph.copied(model)
    copy_state(model, made)
    # Copies keep names, so paths of their layers are the same.
    layers = {kernel.path: kernel.layer for kernel in kernels_of(made)}
    for bits, mode in _MODES.items():
        chosen = {
            id(layers[path]) for path, width in wanted.items() if width == bits and path not in left
        }
        if chosen:
            made.quantize(mode, filters=lambda layer, mine=chosen: id(layer) in mine)
    return made


def _tell(left: dict[str, str], strict: bool) -> None:
    if not left:
        return
    told = (
        "Keras's model.quantize has 8 and 4 bits for Dense, EinsumDense and Embedding, and not "
        + ", ".join(f"{path!r} ({each})" for path, each in left.items())
    )
    if strict:
        nearest = dict.fromkeys(left, FLOAT)
        raise NotExportableError(
            f"{told}. The nearest plan that Keras has is quantize.plan(study, ..., "
            f"pinned={nearest}); without strict=True these layers stay in float",
            nearest,
        )
    _LOG.warning("%s: they stay in float", told)
