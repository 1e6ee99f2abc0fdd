"""Files of LiteRT: weights with the bits of a plan, by recipes of ``ai-edge-quantizer``.

The kernels are rounded before the export, and ``ai-edge-quantizer`` finds scales and integers that
give the same numbers, if its algorithms can. Then the file is read again: the bytes of each weight
are counted, and LiteRT's interpreter answers for some samples.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize.apply import apply
from tfscale.analysis.quantize.kernels import Kernel, kernels_of
from tfscale.analysis.quantize.numbers import as_rows, quantized
from tfscale.analysis.quantize.study import FLOAT
from tfscale.analysis.quantize.unquantized import unquantized, widths_of
from tfscale.support import arguments
from tfscale.support.files import replacing
from tfscale.support.sizes import in_words

BYTES_OFF = 0.02  # share by which the bytes of a file's weights may differ from the plan's
SAME_ANSWERS = 0.995  # share of samples whose largest output must be the same one

_ALL = (2, 4, 8, FLOAT)
_WIDE = (8, FLOAT)
# Widths that LiteRT's operations have, by the layer's kind; the first kind that fits counts.
_WIDTHS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("SeparableConv1D", _WIDE), ("SeparableConv2D", _WIDE), ("DepthwiseConv1D", _WIDE),
    ("DepthwiseConv2D", _WIDE), ("Conv2DTranspose", _WIDE), ("Dense", _ALL), ("Conv1D", _ALL),
    ("Conv2D", _ALL),
)  # fmt: skip
_OTHERS = (FLOAT,)
# Operations whose scales the quantizer can take from the steps between rounded weights.
_RECOVERED = ("CONV_2D", "FULLY_CONNECTED")
_SMALLEST_STEP = 1e-9  # between two weights of a channel, for the quantizer


class NoLiteRTError(ImportError):
    """Raised if a file is asked for and the packages that write it are missing."""

    def __init__(self) -> None:
        super().__init__(
            "plan.to_litert needs ai-edge-quantizer and ai-edge-litert: "
            "pip install '.[litert]' in a checkout of tfscale"
        )


class NotExportableError(ValueError):
    """Raised if an exporter does not have the width of some layers.

    Args:
        message: the error in words.
        nearest: the next width that the exporter has, for each of these layers.
    """

    def __init__(self, message: str, nearest: Mapping[str, int]) -> None:
        super().__init__(message)
        self.nearest = dict(nearest)


class ExportError(RuntimeError):
    """Raised if a file does not hold what was promised."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """A file of LiteRT that was checked.

    Args:
        path: path of the file.
        size: bytes of the file.
        weights: bytes of the planned weights in the file.
        promised: bytes of these weights by the plan.
        same: share of samples whose largest output is that of the quantized model; None without
            samples.
        samples: number of samples.
    """

    path: Path
    size: int
    weights: int
    promised: float
    same: float | None = None
    samples: int = 0

    def __str__(self) -> str:
        told = (
            f"{self.path}: {in_words(self.size)}, of which weights {in_words(self.weights)} "
            f"(promised {in_words(self.promised)})"
        )
        if self.same is None:
            return told
        return f"{told}; the same answer for {self.same:.2%} of {self.samples:,} samples"


def to_litert(plan: Any, path: str | Path, model: Any, x: Any = None) -> Exported:
    """Write a file for LiteRT, and check it; see ``Plan.to_litert``."""
    path = Path(arguments.path(path, "path"))
    arguments.instance(model, "model", keras.Model, "the model of the plan, or quantize.apply's")
    arguments.optional(arguments.data, x, "x")
    is_quantized = bool(widths_of(model))
    plain = unquantized(model) if is_quantized else model
    plan.check(plain)
    refuse_widths(plan, plain)
    tools = _Tools()
    small = model if is_quantized else apply(model, plan)
    _refuse_other_widths(plan, small)
    plain = plain if is_quantized else unquantized(small)
    data, weights = tools.quantized(_converted(plain), _kernels(plan, plain))
    if abs(weights - plan.bytes) > BYTES_OFF * plan.bytes:
        raise ExportError(
            f"the weights take {in_words(weights)} in the file, and the plan promises "
            f"{in_words(plan.bytes)}: ai-edge-quantizer left some in float. {path} is not written"
        )
    found = Exported(path, len(data), weights, plan.bytes)
    if x is not None:
        found = _compared(found, tools, data, small, np.asarray(x))
    with replacing(path) as new:
        new.write_bytes(data)
    return found


def refuse_widths(plan: Any, model: Any) -> None:
    """Raise if LiteRT has no operation for the width of a layer, and name the nearest plan."""
    kinds = {kernel.path: kernel.layer for kernel in kernels_of(model)}
    nearest = {}
    for path, bits in plan.bits.items():
        widths = exportable(kinds[path])
        if bits not in widths:
            nearest[path] = next(width for width in widths if width >= min(bits, FLOAT))
    if nearest:
        told = ", ".join(
            f"{path!r} ({type(kinds[path]).__name__}, {plan.bits[path]} bits)" for path in nearest
        )
        raise NotExportableError(
            f"LiteRT cannot hold these layers of the plan: {told}. The nearest plan that can be "
            f"exported is quantize.plan(study, ..., pinned={nearest})"
            + ("; 32 stands for float" if FLOAT in nearest.values() else ""),
            nearest,
        )


def exportable(layer: Any) -> tuple[int, ...]:
    """Return the widths that LiteRT's operation for a layer has."""
    for name, widths in _WIDTHS:
        kind = getattr(keras.layers, name, None)
        if kind is not None and isinstance(layer, kind):
            return widths
    return _OTHERS


def _refuse_other_widths(plan: Any, small: Any) -> None:
    layers = {path.rpartition("/")[0]: bits for path, bits in widths_of(small).items()}
    wanted = {path: bits for path, bits in plan.bits.items() if bits != FLOAT}
    if layers != wanted:
        other = [path for path in {**layers, **wanted} if layers.get(path) != wanted.get(path)]
        raise ValueError(
            f"{small.name!r} was quantized by another plan: "
            + "; ".join(
                f"{path!r} has {layers.get(path, 'float')} bits, in this plan "
                f"{wanted.get(path, 'float')}" for path in other[:3]
            )
            + ". Give the model that quantize.apply made of this plan, or the float model"
        )  # fmt: skip


def _kernels(plan: Any, plain: Any) -> list[tuple[Kernel, int]]:
    return [(kernel, plan.bits[kernel.path]) for kernel in kernels_of(plain)]


def _converted(model: Any) -> bytes:
    """Return a model as a file of LiteRT, in float."""

    # The converter leaves variables in the file as such, and the quantizer knows constants only.
    weights = [
        [tf.constant(np.asarray(variable)) for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    ]

    @tf.function(autograph=False)
    def answer(*inputs: Any) -> Any:
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return model.stateless_call(*weights, given, training=False)[0]

    specs = [tf.TensorSpec(each.shape, each.dtype) for each in model.inputs]
    function = answer.get_concrete_function(*specs)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], tf.Module())
    return bytes(converter.convert())


class _Tools:
    """The packages that read and write files of LiteRT."""

    def __init__(self) -> None:
        try:
            from ai_edge_litert.interpreter import Interpreter
            from ai_edge_quantizer import quantizer
            from ai_edge_quantizer.utils import tfl_flatbuffer_utils
        except ImportError as error:
            raise NoLiteRTError from error
        self.interpreter = Interpreter
        self._quantizer, self._files = quantizer, tfl_flatbuffer_utils

    def quantized(self, data: bytes, kernels: list[tuple[Kernel, int]]) -> tuple[bytes, int]:
        """Return a file whose weights have few bits, and the bytes of these weights."""
        made = self._quantizer.Quantizer(bytearray(data))
        names = self._files.TFL_OP_CODE_TO_NAME
        found: list[str] = []
        for kernel, bits in kernels:
            uses = list(self._uses(data, kernel))
            if not uses:
                raise ExportError(
                    f"the kernel of {kernel.path!r} is not in the converted file: TensorFlow's "
                    "converter has changed it. Pin its layer to 32 bits: pinned="
                    f"{{{kernel.path!r}: 32}}"
                )
            for code, operation, tensor in uses:
                found.append(tensor)
                if bits != FLOAT:
                    self._add(made, f"^{re.escape(operation)}$", names[code], kernel, bits)
        result = bytes(made.quantize().quantized_model)
        return result, self._bytes_of(result, set(found))

    def _add(self, made: Any, operation: str, kind: Any, kernel: Kernel, bits: int) -> None:
        keys = self._quantizer.algorithm_manager.AlgorithmName
        key = keys.MIN_MAX_UNIFORM_QUANT
        if kind.value in _RECOVERED and not _reaches_the_end(kernel, bits) and _has_step(kernel):
            key = keys.DEQUANTIZED_WEIGHT_RECOVERY
        made.add_dynamic_config(operation, kind, bits, algorithm_key=key)

    def _uses(self, data: bytes, kernel: Kernel) -> Iterator[tuple[int, str, str]]:
        """Yield code and scope of each operation that reads a kernel, and the tensor's name.

        Names of operations change while the converter fuses them, so numbers are compared: those of
        a kernel, in any order.
        """
        numbers = np.sort(np.asarray(kernel.variable, np.float32).ravel())
        file = self._files.read_model(bytearray(data))
        for graph in file.subgraphs:
            for operation in graph.operators:
                for index in operation.inputs:
                    tensor = graph.tensors[index]
                    if index < 0 or math.prod(tensor.shape or ()) != numbers.size:
                        continue
                    there = self._files.get_tensor_data(tensor, file.buffers)
                    if there is None or there.dtype != np.float32:
                        continue
                    if np.array_equal(np.sort(there.ravel()), numbers):
                        code = file.operatorCodes[operation.opcodeIndex].builtinCode
                        scope = self._files.get_op_scope(operation, graph.tensors)
                        yield code, scope, self._files.get_tensor_name(tensor)

    def _bytes_of(self, data: bytes, names: set[str]) -> int:
        """Return the bytes of some tensors in a file."""
        file = self._files.read_model(bytearray(data))
        buffers = {
            tensor.buffer
            for graph in file.subgraphs
            for tensor in graph.tensors
            if self._files.get_tensor_name(tensor) in names
        }
        return sum(len(file.buffers[one].data) for one in buffers)


def _reaches_the_end(kernel: Kernel, bits: int) -> bool:
    """Return whether each channel has a weight at the end of its range, so that the largest weight
    gives the scale.
    """
    value = np.asarray(kernel.variable, np.float32)
    return np.allclose(quantized(value, bits, axis=kernel.axes, method="minmax"), value, 1e-4, 1e-7)


def _has_step(kernel: Kernel) -> bool:
    """Return whether each channel has two weights that are one step apart, or a weight of one step,
    so that the smallest difference gives the scale.
    """
    rows = np.abs(as_rows(np.asarray(kernel.variable, np.float32), kernel.axes))
    steps = np.diff(np.sort(np.concatenate([np.zeros_like(rows[:, :1]), rows], 1), 1), axis=1)
    scale = np.where(steps > _SMALLEST_STEP, steps, np.inf).min(1, keepdims=True)
    return np.allclose(np.rint(rows / scale) * scale, rows, 1e-4, 1e-7)


def _compared(found: Exported, tools: _Tools, data: bytes, small: Any, x: np.ndarray) -> Exported:
    """Compare the answers of a file with those of the quantized model."""
    expected = np.asarray(small.predict(x, verbose=0))
    given = _answers(tools, data, x)
    if expected.shape[-1] < 2:
        same = np.isclose(given, expected, rtol=0.05, atol=0.05 * np.abs(expected).max())
    else:
        same = given.argmax(-1) == expected.argmax(-1)
    share = float(np.mean(same))
    if share < SAME_ANSWERS:
        raise ExportError(
            f"the file gives the answer of {small.name!r} for {share:.2%} of {len(x):,} samples, "
            f"and {SAME_ANSWERS:.1%} are expected. LiteRT rounds activations to 8 bits: give "
            f"samples that the model knows, or wider widths. {found.path} is not written"
        )
    return dataclasses.replace(found, same=share, samples=len(x))


def _answers(tools: _Tools, data: bytes, x: np.ndarray, batch: int = 100) -> np.ndarray:
    interpreter = tools.interpreter(model_content=data)
    place = interpreter.get_input_details()[0]
    output = interpreter.get_output_details()[0]["index"]
    answers = []
    for begin in range(0, len(x), batch):
        rows = np.asarray(x[begin : begin + batch], place["dtype"])
        interpreter.resize_tensor_input(place["index"], rows.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(place["index"], rows)
        interpreter.invoke()
        answers.append(interpreter.get_tensor(output))
    return np.concatenate(answers)
