"""Layers of Keras that compute with few bits.

Each is a subclass of Keras's layer: it has the same name and weights, and in addition quantizers.
While a model trains, weights and inputs are rounded, and the layer computes with real numbers.
While it infers, the layer computes with whole numbers that float32 or float64 hold exactly, so a
program of integers gives the same (``integers.py``). Half precision, and layers whose inputs are
not quantized, always compute with real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfscale.analysis.quantize import dyadic
from tfscale.analysis.quantize.grid import Grid, Watch, registered, rounds_to_grid
from tfscale.analysis.quantize.kernels import einsum_axes
from tfscale.analysis.quantize.quantizer import Quantizer
from tfscale.bridge.objects import mask_of, set_mask, with_mask

_EXACT_IN_FLOAT32 = 2**24


class Stage(NamedTuple):
    """One product of a layer's inputs with a kernel.

    Attributes:
        kernel: name of the attribute that holds the kernel.
        axes: the kernel's axes of output channels.
        product: function of inputs and a kernel.
    """

    kernel: str
    axes: tuple[int, ...]
    product: Callable[[Any, Any], Any]


class Quantizing:
    """A layer whose kernels and inputs have few bits: the base of all quantizing layers.

    Args:
        quantization: ``bits`` of weights, bits of ``activations`` or None, ``symmetric``,
            ``group`` (consecutive channels that share a scale; None for all), ``learned``.
    """

    watch: Watch | None = None

    def __init__(self: Any, *args: Any, quantization: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quantization = dict(quantization)

    def stages(self) -> list[Stage]:
        """Return the products of the layer, in order."""
        raise NotImplementedError

    def build(self: Any, input_shape: Any = None) -> None:
        """Make the weights of Keras's layer, and the quantizers."""
        super().build(input_shape)  # type: ignore[misc]
        self.add_quantizers(self.stages())

    def add_quantizers(self: Any, stages: list[Stage]) -> None:
        """Make a quantizer for each kernel, and for what it is multiplied with."""
        how = self.quantization
        self.kernel_quantizers, self.input_quantizers = [], []
        for stage in stages:
            kernel = getattr(self, stage.kernel)
            axes = () if how["group"] is None else stage.axes
            quantizer = Quantizer(
                how["bits"], tuple(kernel.shape), axes, how["group"] or 1,
                symmetric=how["symmetric"], learned=how["learned"],
                name=f"{stage.kernel}_quantizer",
            )  # fmt: skip
            self.kernel_quantizers.append(quantizer)
            if how["activations"] is not None:
                self.input_quantizers.append(
                    Quantizer(
                        how["activations"],
                        symmetric=how["symmetric_activations"],
                        learned=how["learned"],
                        name=f"{stage.kernel}_input_quantizer",
                    )
                )
        self.grid = Grid(name="grid")
        self.build_each(*self.kernel_quantizers, *self.input_quantizers, self.grid)

    def build_each(self: Any, *layers: Any) -> None:
        """Make the weights of quantizers, which do not learn in a frozen layer."""
        for each in layers:
            each.build(None)
            each.trainable = self.trainable

    def call(self: Any, inputs: Any, training: Any = None) -> Any:
        """Compute with few bits; with Keras's own numbers while the layer is calibrated."""
        if not inputs.dtype.is_floating:  # Keras's products with a kernel are real numbers
            inputs = tf.cast(inputs, self.compute_dtype)
        if self.watch is not None:
            outputs = self._biased(self._watched(inputs))
        elif self.input_quantizers and rounds_to_grid(self, training):
            outputs = self._exact(inputs)
        else:
            outputs = self._biased(self._rounded(inputs))
        return outputs if self.activation is None else self.activation(outputs)

    def _watched(self: Any, x: Any) -> Any:
        for i, stage in enumerate(self.stages()):
            self.watch.note(x, i)
            x = stage.product(x, getattr(self, stage.kernel))
            self.watch.note(x)
        return x

    def _rounded(self: Any, x: Any) -> Any:
        for i, stage in enumerate(self.stages()):
            if self.input_quantizers:
                x = self.input_quantizers[i].fake(x)
            kernel = tf.convert_to_tensor(getattr(self, stage.kernel))
            x = stage.product(x, self.kernel_quantizers[i].fake(kernel))
        return x

    def _exact(self: Any, inputs: Any) -> Any:
        whole, step = self.grid.enter(inputs), tf.convert_to_tensor(self.grid.step)
        for i, stage in enumerate(self.stages()):
            sums = self._sums(stage, i, self.input_quantizers[i].from_grid(whole, step))
            factor = self.output_factor(i, step)
            whole = clipped(dyadic.round_half_up(tf.cast(sums, tf.float64) * factor))
        if self.has_bias():
            whole = clipped(whole + self.along_channels(self.grid.enter(self.bias)))
        return self.grid.leave(whole, inputs.dtype)

    def _sums(self: Any, stage: Stage, i: int, whole: Any) -> Any:
        """Return the exact sums of products of whole numbers."""
        kernel = self.kernel_quantizers[i].integers(getattr(self, stage.kernel))
        bound = self.largest_sum(i)
        dtype = tf.float32 if bound < _EXACT_IN_FLOAT32 else tf.float64
        return stage.product(tf.cast(whole, dtype), tf.cast(kernel, dtype))

    def largest_sum(self: Any, i: int) -> int:
        """Return a bound of the accumulators' magnitude."""
        stage = self.stages()[i]
        shape = getattr(self, stage.kernel).shape
        axes = {axis % len(shape) for axis in stage.axes}
        terms = math.prod(size for axis, size in enumerate(shape) if axis not in axes)
        return int(terms * _span(self.kernel_quantizers[i]) * _span(self.input_quantizers[i]))

    def output_factor(self: Any, i: int, step: Any) -> Any:
        """Return what accumulators are multiplied with to be numbers of the grid."""
        scale = tf.cast(self.kernel_quantizers[i].scales(), tf.float64)
        scale = scale * tf.cast(self.input_quantizers[i].scales(), tf.float64)
        factor = dyadic.dyadic_tensor(scale / tf.cast(step, tf.float64))
        if not self.kernel_quantizers[i].axes:
            return tf.reshape(factor, [])
        return self.along_channels(self.channels_of(factor))

    def channels_of(self: Any, factor: Any) -> Any:
        """Return factors in the shape of the bias, from the shape of the kernel."""
        return tf.reshape(factor, [-1])

    def along_channels(self: Any, vector: Any) -> Any:
        """Return one number per channel in a shape that spreads over outputs."""
        if getattr(self, "data_format", "channels_last") == "channels_last":
            return vector
        return tf.reshape(vector, [-1] + [1] * self.rank)

    def has_bias(self: Any) -> bool:
        """Return whether the layer has a bias."""
        return getattr(self, "bias", None) is not None

    def _biased(self: Any, outputs: Any) -> Any:
        if self.has_bias():
            outputs = outputs + self.along_channels(tf.convert_to_tensor(self.bias))
        if self.watch is not None:
            self.watch.note(outputs)
        return outputs

    def get_config(self: Any) -> dict[str, Any]:
        """Return the arguments of Keras's layer, and the quantization."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**config, "quantization": dict(self.quantization)}


def clipped(whole: Any) -> Any:
    """Return whole numbers within what the grid holds."""
    return tf.clip_by_value(whole, -dyadic.LARGEST_ON_GRID, dyadic.LARGEST_ON_GRID)


def _span(quantizer: Quantizer) -> int:
    """Return the largest distance of an integer from the zero point."""
    low, high = quantizer.limits
    return high if quantizer.symmetric else high - low


@registered
class QuantizedDense(Quantizing, keras.layers.Dense):
    """Keras's Dense with few bits."""

    def stages(self) -> list[Stage]:
        """Return the product."""
        return [Stage("kernel", (-1,), keras.ops.matmul)]


@registered
class QuantizedEinsumDense(Quantizing, keras.layers.EinsumDense):
    """Keras's EinsumDense with few bits."""

    def _letters(self) -> tuple[str, str]:
        inputs, output = self.equation.replace(" ", "").split("->")
        return inputs.split(",")[1], output

    def stages(self) -> list[Stage]:
        """Return the product."""
        return [
            Stage("kernel", einsum_axes(self), lambda x, k: keras.ops.einsum(self.equation, x, k))
        ]

    def channels_of(self, factor: Any) -> Any:
        """Return factors in the order of the outputs' axes."""
        kernel, output = self._letters()
        order = sorted(range(len(kernel)), key=lambda i: output.find(kernel[i]))
        factor = tf.transpose(factor, order)
        shared = sum(letter not in output for letter in kernel)
        factor = tf.reshape(factor, factor.shape[shared:])
        first = min(output.find(letter) for letter in kernel if letter in output)
        after = output[first:].replace("...", "")
        sizes = dict(zip([kernel[i] for i in order][shared:], factor.shape, strict=True))
        return tf.reshape(factor, [sizes.get(letter, 1) for letter in after])

    def along_channels(self, vector: Any) -> Any:
        """Return numbers as they are: their last axes are those of the outputs."""
        return vector


class _Convolution(Quantizing):
    def stages(self: Any) -> list[Stage]:
        """Return the product."""
        return [Stage("kernel", (-1,), self.convolution_op)]


@registered
class QuantizedConv1D(_Convolution, keras.layers.Conv1D):
    """Keras's Conv1D with few bits."""

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Convolve, with zeros before the first step if the padding is causal."""
        padding = self.padding
        if padding == "causal":
            before = self.dilation_rate[0] * (self.kernel_size[0] - 1)
            axis = 1 if self.data_format == "channels_last" else 2
            inputs = tf.pad(inputs, [[before if i == axis else 0, 0] for i in range(3)])
            padding = "valid"
        return keras.ops.conv(
            inputs, kernel, strides=list(self.strides), padding=padding,
            dilation_rate=self.dilation_rate, data_format=self.data_format,
        )  # fmt: skip


@registered
class QuantizedConv2D(_Convolution, keras.layers.Conv2D):
    """Keras's Conv2D with few bits."""


@registered
class QuantizedConv3D(_Convolution, keras.layers.Conv3D):
    """Keras's Conv3D with few bits."""


class _Depthwise(Quantizing):
    def stages(self: Any) -> list[Stage]:
        """Return the product."""
        return [Stage("kernel", (-2, -1), self._product)]

    def _product(self: Any, x: Any, kernel: Any) -> Any:
        return keras.ops.depthwise_conv(
            x, kernel, strides=self.strides, padding=self.padding,
            dilation_rate=self.dilation_rate, data_format=self.data_format,
        )  # fmt: skip


@registered
class QuantizedDepthwiseConv1D(_Depthwise, keras.layers.DepthwiseConv1D):
    """Keras's DepthwiseConv1D with few bits."""


@registered
class QuantizedDepthwiseConv2D(_Depthwise, keras.layers.DepthwiseConv2D):
    """Keras's DepthwiseConv2D with few bits."""


class _Separable(Quantizing):
    def stages(self: Any) -> list[Stage]:
        """Return the convolution of each channel, and the sums over channels."""
        return [
            Stage("depthwise_kernel", (-2, -1), self._each_channel),
            Stage("pointwise_kernel", (-1,), self._over_channels),
        ]

    def _each_channel(self: Any, x: Any, kernel: Any) -> Any:
        return keras.ops.depthwise_conv(
            x, kernel, strides=self.strides, padding=self.padding,
            dilation_rate=self.dilation_rate, data_format=self.data_format,
        )  # fmt: skip

    def _over_channels(self: Any, x: Any, kernel: Any) -> Any:
        return keras.ops.conv(x, kernel, strides=1, padding="valid", data_format=self.data_format)


@registered
class QuantizedSeparableConv1D(_Separable, keras.layers.SeparableConv1D):
    """Keras's SeparableConv1D with few bits."""


@registered
class QuantizedSeparableConv2D(_Separable, keras.layers.SeparableConv2D):
    """Keras's SeparableConv2D with few bits."""


class _Transposed(Quantizing):
    def stages(self: Any) -> list[Stage]:
        """Return the product."""
        return [Stage("kernel", (-2,), self._product)]

    def _product(self: Any, x: Any, kernel: Any) -> Any:
        return keras.ops.conv_transpose(
            x, kernel, strides=list(self.strides), padding=self.padding,
            output_padding=self.output_padding, dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )  # fmt: skip


@registered
class QuantizedConv1DTranspose(_Transposed, keras.layers.Conv1DTranspose):
    """Keras's Conv1DTranspose with few bits."""


@registered
class QuantizedConv2DTranspose(_Transposed, keras.layers.Conv2DTranspose):
    """Keras's Conv2DTranspose with few bits."""


@registered
class QuantizedEmbedding(Quantizing, keras.layers.Embedding):
    """Keras's Embedding with few bits: each row of the table has a scale."""

    def __init__(self, *args: Any, quantization: dict[str, Any], **kwargs: Any) -> None:
        weights_only = {**quantization, "activations": None}
        super().__init__(*args, quantization=weights_only, **kwargs)

    def stages(self) -> list[Stage]:
        """Return the table."""
        return [Stage("embeddings", (0,), lambda rows, table: keras.ops.take(table, rows, axis=0))]

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Look up rounded rows."""
        if self.watch is not None:
            found = super(Quantizing, self).call(inputs)
            self.watch.note(found)
            return found
        table = self.kernel_quantizers[0].fake(tf.convert_to_tensor(self.embeddings))
        return tf.cast(keras.ops.take(table, tf.cast(inputs, tf.int32), axis=0), self.compute_dtype)


@registered
class QuantizedMultiHeadAttention(Quantizing, keras.layers.MultiHeadAttention):
    """Keras's MultiHeadAttention, whose four kernels have few bits.

    Query, key and value share the range of their quantizer; attention itself stays in real numbers.
    """

    PARTS = ("query", "key", "value", "attention_output")

    def build(  # type: ignore[override]
        self, query_shape: Any, value_shape: Any, key_shape: Any = None
    ) -> None:
        """Make the weights of Keras's layer, and the quantizers."""
        super(Quantizing, self).build(query_shape, value_shape, key_shape)
        self.kernel_quantizers, self.input_quantizers = [], []
        how, activations = self.quantization, self.quantization["activations"]
        for part, dense in self.parts().items():
            if how["bits"].get(part) is None:
                continue
            last = (
                1 if part == "attention_output" else 2
            )  # axes of outputs: embedding, or heads and keys
            rank = len(dense.kernel.shape)
            axes = () if how["group"] is None else range(rank - last, rank)
            quantizer = Quantizer(
                how["bits"][part], tuple(dense.kernel.shape), axes, how["group"] or 1,
                symmetric=how["symmetric"], learned=how["learned"], name=f"{part}_quantizer",
            )  # fmt: skip
            self.kernel_quantizers.append(quantizer)
        if activations is not None:
            self.input_quantizers.append(
                Quantizer(
                    activations,
                    symmetric=how["symmetric_activations"],
                    learned=how["learned"],
                    name="input_quantizer",
                )
            )
        self.build_each(*self.kernel_quantizers, *self.input_quantizers)

    def parts(self) -> dict[str, Any]:
        """Return the layers that hold the kernels."""
        held = (self.query_dense, self.key_dense, self.value_dense, self.output_dense)
        return dict(zip(self.PARTS, held, strict=True))

    def kernels(self) -> list[Any]:
        """Return the kernels that have quantizers."""
        bits = self.quantization["bits"]
        return [dense.kernel for part, dense in self.parts().items() if bits.get(part) is not None]

    def call(  # type: ignore[override]
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: Any = None,
        use_causal_mask: bool = False,
    ) -> Any:
        """Attend with rounded kernels and inputs."""
        inputs = [query, value, value if key is None else key]
        masks = [query_mask, value_mask, key_mask, attention_mask]
        how = [return_attention_scores, training, use_causal_mask]
        if self.watch is not None:
            for each in inputs:
                self.watch.note(each, 0)
            return super(Quantizing, self).call(*inputs, *masks, *how)
        kept = [mask_of(each) for each in inputs]
        for each in inputs:  # as Keras's attention does: sums with its outputs have no mask
            set_mask(each, None)
        for quantizer in self.input_quantizers:
            inputs = [quantizer.fake(each) for each in inputs]
        inputs = [with_mask(each, mask) for each, mask in zip(inputs, kept, strict=True)]
        values = {id(each): (each, tf.convert_to_tensor(each)) for each in self.variables}
        for kernel, quantizer in zip(self.kernels(), self.kernel_quantizers, strict=True):
            values[id(kernel)] = (kernel, quantizer.fake(tf.convert_to_tensor(kernel)))
        state = list(values.values())
        with keras.StatelessScope(state_mapping=state, collect_losses=True) as scope:
            outputs = super(Quantizing, self).call(*inputs, *masks, *how)
        for loss in scope.losses:
            self.add_loss(loss)
        for variable, before in values.values():  # seeds of dropout
            if (after := scope.get_current_value(variable)) is not before:
                variable.assign(after)
        return outputs


LAYERS: dict[type, Any] = {
    keras.layers.Dense: QuantizedDense,
    keras.layers.EinsumDense: QuantizedEinsumDense,
    keras.layers.Conv1D: QuantizedConv1D,
    keras.layers.Conv2D: QuantizedConv2D,
    keras.layers.Conv3D: QuantizedConv3D,
    keras.layers.DepthwiseConv1D: QuantizedDepthwiseConv1D,
    keras.layers.DepthwiseConv2D: QuantizedDepthwiseConv2D,
    keras.layers.SeparableConv1D: QuantizedSeparableConv1D,
    keras.layers.SeparableConv2D: QuantizedSeparableConv2D,
    keras.layers.Conv1DTranspose: QuantizedConv1DTranspose,
    keras.layers.Conv2DTranspose: QuantizedConv2DTranspose,
    keras.layers.Embedding: QuantizedEmbedding,
    keras.layers.MultiHeadAttention: QuantizedMultiHeadAttention,
}
