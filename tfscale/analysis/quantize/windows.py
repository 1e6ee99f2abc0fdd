"""Products of whole numbers with kernels, and pooling, in NumPy, as Keras defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Product = Callable[[np.ndarray, np.ndarray], np.ndarray]
_SMALL = -(2**40)  # a maximum ignores padding


def product(layer: Any, stage: int) -> Product:
    """Return the product of a quantizing layer's stage."""
    kind = type(layer).__name__
    if kind == "QuantizedDense":
        return np.matmul
    if kind == "QuantizedEinsumDense":
        return lambda x, kernel: np.einsum(layer.equation, x, kernel)
    if "Transpose" in kind or not hasattr(layer, "kernel_size"):
        raise ValueError(f"{layer.name!r} is a {kind}, which integers do not compute yet")
    if stage == 1:  # the second one of a separable convolution
        return _first_and_back(layer, lambda x, k: np.tensordot(x, k.reshape(k.shape[-2:]), 1))
    is_depthwise = "Depthwise" in kind or "Separable" in kind
    each = _depthwise(layer) if is_depthwise else _convolution(layer)
    return _first_and_back(layer, each)


def _first_and_back(layer: Any, channels_last: Product) -> Product:
    """Return a product of inputs in the layer's format, from one with channels last."""
    if layer.data_format == "channels_last":
        return channels_last
    return lambda x, kernel: np.moveaxis(channels_last(np.moveaxis(x, 1, -1), kernel), -1, 1)


def _convolution(layer: Any) -> Product:
    def convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        groups, rank = layer.groups, kernel.ndim - 2
        found = []
        for part, own in zip(np.split(x, groups, -1), np.split(kernel, groups, -1), strict=True):
            seen = windows(
                part, layer.kernel_size, layer.strides, layer.padding, layer.dilation_rate
            )
            # windows end with channels and places; kernels begin with places and channels
            own = np.moveaxis(own, rank, 0)
            found.append(np.tensordot(seen, own, rank + 1))
        return np.concatenate(found, -1)

    return convolve


def _depthwise(layer: Any) -> Product:
    def convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
        seen = windows(x, kernel.shape[:-2], layer.strides, layer.padding, layer.dilation_rate)
        places = seen.reshape(*seen.shape[: x.ndim], -1)
        found = np.einsum("...ck,kcm->...cm", places, kernel.reshape(-1, *kernel.shape[-2:]))
        return np.asarray(found.reshape(*found.shape[:-2], -1))

    return convolve


def windows(
    x: np.ndarray,
    size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    dilation: Sequence[int] = (),
    filled: int = 0,
) -> np.ndarray:
    """Return what each place of the output sees: axes of places, of channels, then of windows."""
    dilation = dilation or (1,) * len(size)
    spans = [(k - 1) * d + 1 for k, d in zip(size, dilation, strict=True)]
    ends = [
        _ends(n, span, stride, padding)
        for n, span, stride in zip(x.shape[1:-1], spans, strides, strict=True)
    ]
    x = np.pad(x, [(0, 0), *ends, (0, 0)], constant_values=filled)
    axes = tuple(range(1, x.ndim - 1))
    seen = np.lib.stride_tricks.sliding_window_view(x, spans, axes)
    places = [slice(None, None, stride) for stride in strides]
    inside = [slice(None, None, each) for each in dilation]
    return np.asarray(seen[tuple([slice(None), *places, slice(None), *inside])])


def _ends(size: int, span: int, stride: int, padding: str) -> tuple[int, int]:
    """Return the zeros before and after an axis."""
    if padding == "valid":
        return 0, 0
    if padding == "causal":
        return span - 1, 0
    missing = max((-(-size // stride) - 1) * stride + span - size, 0)
    return missing // 2, missing - missing // 2


def padded(layer: Any, x: np.ndarray) -> np.ndarray:
    """Return inputs between the zeros of a ZeroPadding layer."""
    given = layer.padding
    ends = [tuple(given)] if isinstance(given[0], int) else [tuple(each) for each in given]
    last = getattr(layer, "data_format", "channels_last") == "channels_last"
    return np.pad(x, [(0, 0), *ends, (0, 0)] if last else [(0, 0), (0, 0), *ends])


def pooling(layer: Any) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Return what a pooling layer does: maxima, or means rounded half up."""
    is_mean = "Average" in type(layer).__name__
    pooled = _global(layer, is_mean) if "Global" in type(layer).__name__ else _local(layer, is_mean)
    if layer.data_format == "channels_last":
        return lambda given: pooled(given[0])
    if "Global" in type(layer).__name__ and not layer.keepdims:
        return lambda given: pooled(np.moveaxis(given[0], 1, -1))
    return lambda given: np.moveaxis(pooled(np.moveaxis(given[0], 1, -1)), -1, 1)


def _global(layer: Any, is_mean: bool) -> Callable[[np.ndarray], np.ndarray]:
    def pool(x: np.ndarray) -> np.ndarray:
        axes = tuple(range(1, x.ndim - 1))
        if not is_mean:
            return np.asarray(x.max(axes, keepdims=layer.keepdims))
        count = int(np.prod(x.shape[1:-1]))
        return rounded_quotient(x.sum(axes, keepdims=layer.keepdims), np.int64(count))

    return pool


def _local(layer: Any, is_mean: bool) -> Callable[[np.ndarray], np.ndarray]:
    def pool(x: np.ndarray) -> np.ndarray:
        how = (layer.pool_size, layer.strides, layer.padding)
        axes = tuple(range(x.ndim, x.ndim + len(layer.pool_size)))
        if not is_mean:
            return np.asarray(windows(x, *how, filled=_SMALL).max(axes))
        counts = windows(np.ones_like(x), *how).sum(axes)
        return rounded_quotient(windows(x, *how).sum(axes), counts)

    return pool


def rounded_quotient(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return means of whole numbers, rounded half up."""
    return np.asarray((2 * sums + counts) // (2 * counts))
