"""Pruning while a model trains: a callback that sets more and more weights to zero.

A mask is a constraint of its weight, so optimizers apply it after each update, on each replica.
Nothing else is kept: which weights are pruned follows from the weights and the step, because pruned
weights are zero and so have the lowest scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.quantize.channels import Channels, kernel_of
from tfscale.analysis.quantize.graph import operations
from tfscale.bridge import fit
from tfscale.bridge.graphs import of_first_replica
from tfscale.bridge.installed import refuse_keras_2
from tfscale.bridge.objects import build_on, innermost, layers_of
from tfscale.exchange.scaling import scaling
from tfscale.support import arguments

_KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
_BY = "a dict from kernels' paths to arrays of their shapes, such as a Hessian's diagonal"


class Mask:
    """A constraint that keeps pruned weights at zero, after a weight's own constraint.

    Args:
        weight: the weight.
    """

    def __init__(self, weight: Any) -> None:
        self._own = weight.constraint
        ones = np.ones(weight.shape, weight.dtype)
        self.kept = keras.Variable(ones, dtype=weight.dtype, trainable=False, name="mask")

    def __call__(self, weight: Any) -> Any:
        """Return the weight with zeros."""
        weight = weight if self._own is None else self._own(weight)
        return tf.convert_to_tensor(weight) * tf.convert_to_tensor(self.kept)


class Prune(keras.callbacks.Callback):
    r"""A callback that sets the weights of least importance to zero, step by step.

    After step :math:`t`, the share of zeros is

    .. math:: s_t = s \left(1 - \left(1 - \frac{t - b}{e - b}\right)^3\right), \quad b \le t \le e

    for a final ``sparsity`` :math:`s`, from step ``begin`` to step ``end``. The importance of a
    weight is its magnitude, or :math:`h w^2` with the numbers :math:`h` of ``by``.

    - **Channels.** With ``channels=True`` whole output channels become zero, with their biases and
      batch norms, and ``quantize.shrink`` removes them afterwards. Layers that feed one residual
      sum lose channels together. The importance of a channel is the sum of :math:`w^2` or
      :math:`h w^2` over its weights.
    - **Resuming.** Weights and ``optimizer.iterations`` say which weights are pruned. So a training
      that resumes from a checkpoint with this callback continues as if without interruption.
    - **Replicas** have the same weights and compute the same masks. The strategy must sum in each
      step, its default; other rules are refused.
    - **Afterwards** masks stay on the model until the program ends. A model that is loaded from a
      file needs this callback again, or its zeros are trained.

    Args:
        sparsity: share of weights, or of channels, that are zero at the end.
        begin: the first step that prunes.
        end: the step from which the share stays.
        every: number of steps between two masks.
        by: maps kernels' paths to arrays of the kernels' shapes; kernels that it leaves out are not
            pruned.
        kernels: a regular expression; only kernels whose paths it matches are pruned.
        channels: whether whole channels are pruned.

    Example:
        >>> from tfscale import quantize
        >>> prune = quantize.Prune(0.75, end=6, every=2)
        >>> history = model.fit(x, y, epochs=2, callbacks=[prune], verbose=0)
        >>> print(prune.sparsity_at(3), float((model.layers[0].kernel.numpy() == 0).mean()))
        0.65625 0.75

    Reference: Zhu, Gupta, To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model
        Compression, https://arxiv.org/abs/1710.01878; LeCun et al., Optimal Brain Damage, for
        importances by the Hessian.
    """

    def __init__(
        self,
        sparsity: float,
        *,
        begin: int = 0,
        end: int,
        every: int = 100,
        by: Mapping[str, Any] | None = None,
        kernels: str = "",
        channels: bool = False,
    ) -> None:
        super().__init__()
        refuse_keras_2("Prune sets constraints of Keras 3")
        self.sparsity = arguments.real(sparsity, "sparsity", above=0, below=1, what="a share")
        self.begin = arguments.whole(begin, "begin", 0, what="a number of steps")
        self.end = arguments.whole(end, "end", 1, what="a number of steps")
        if self.end <= self.begin:
            raise ValueError(f"end is a step after begin={self.begin}; got {self.end}")
        self.every = arguments.whole(every, "every", 1, what="a number of steps")
        self.channels = arguments.flag(channels, "channels")
        self._by = arguments.optional(_importances, by, "by")
        self._pattern = arguments.pattern(kernels, "kernels")
        self._masks: list[tuple[Any, Mask]] = []
        self._groups: list[_Group] = []
        self._pruned = -1  # step of the masks

    def sparsity_at(self, step: int) -> float:
        """Return the share of zeros after a step."""
        step = arguments.whole(step, "step", 0)
        done = (min(step, self.end) - self.begin) / (self.end - self.begin)
        return self.sparsity * (1 - (1 - done) ** 3) if step >= self.begin else 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the kernels, and restore the masks of a training that goes on."""
        strategy = self.model.distribute_strategy
        ours = scaling(strategy)
        if ours is not None and ours.figures_of_rounds():
            raise ValueError(
                "Prune needs weights that are the same on all replicas, and the strategy's sync "
                "lets them differ for some steps: leave out sync="
            )
        self._build(strategy)
        self._find()
        with strategy.scope():
            is_new = False
            for weight in self._weights():
                if not isinstance(weight.constraint, Mask):
                    weight.constraint, is_new = Mask(weight), True
        if is_new and self.model.train_function is not None:
            fit.trace_again(self.model)  # a step traced before has no masks
        self._pruned = -1
        self._prune(self._step())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Prune more, if it is time."""
        self._prune(self._step())

    def on_train_end(self, logs: Any = None) -> None:
        """Mask weights again that the optimizer has replaced by their averages."""
        if not innermost(self.model.optimizer).use_ema:
            return
        for weight in self._weights():
            weight.assign(np.asarray(weight) * np.asarray(weight.constraint.kept))

    def _build(self, strategy: Any) -> None:
        """Make the weights of a model that knows no shapes before its first batch."""
        iterator = fit.iterator()
        if iterator is None or all(layer.built for layer in layers_of(self.model)):
            return
        spec = tf.nest.map_structure(of_first_replica, fit.element_spec(iterator))
        with strategy.scope():
            build_on(self.model, spec)

    def _step(self) -> int:
        return int(np.asarray(innermost(self.model.optimizer).iterations))

    def _find(self) -> None:
        """Find what is pruned together."""
        found = _groups_of_channels(self.model) if self.channels else _single(self.model)
        self._groups = [each for each in found if self._is_chosen(each)]
        if not found and self.channels:
            raise ValueError(
                f"model {self.model.name!r} has no layer whose channels can be pruned: a layer "
                "keeps them if the model's output, a model inside the model, or a layer that "
                "quantize.shrink does not know reads them, or if it is frozen. "
                "channels=False prunes single weights"
            )
        if not self._groups:
            pattern = self._pattern.pattern
            raise ValueError(
                f"model {self.model.name!r} has no kernel that can be pruned"
                + (f", whose path kernels={pattern!r} matches" if pattern else "")
                + (", and that by= has" if self._by else "")
                + ": kernels are trainable matrices in attributes named "
                + ", ".join(_KERNELS)
            )

    def _is_chosen(self, group: _Group) -> bool:
        return all(
            self._pattern.search(kernel.path) and (self._by is None or self._has(kernel))
            for kernel, _ in group.kernels
        )

    def _has(self, kernel: Any) -> bool:
        assert self._by is not None
        found = self._by.get(kernel.path)
        if found is not None and np.shape(found) != tuple(kernel.shape):
            raise arguments.wrong(
                np.shape(found), f"the shape of by[{kernel.path!r}]", f"{tuple(kernel.shape)}"
            )
        return found is not None

    def _weights(self) -> list[Any]:
        found = {id(one): one for group in self._groups for one, _ in group.masked()}
        return list(found.values())

    def _prune(self, step: int) -> None:
        """Make the masks of the last step that prunes, at or before a step."""
        if step < self.begin:
            return
        at = min(step, self.end)
        if at < self.end:
            at -= (at - self.begin) % self.every
        if at == self._pruned:
            return
        self._pruned = at
        for group in self._groups:
            lost = group.least(self.sparsity_at(at), self._by)
            for weight, spread in group.masked():
                kept = spread(~lost).astype(weight.dtype)
                mask = weight.constraint.kept
                mask.assign(np.asarray(mask) * kept)
                weight.assign(np.asarray(weight) * kept)


def _importances(given: Any, name: str) -> dict[str, Any]:
    """Return importances by kernels' paths."""
    found = arguments.mapping(given, name, _BY)
    if not found:
        raise arguments.wrong(given, name, _BY)
    return {arguments.text(path, f"a path of {name}"): each for path, each in found.items()}


class _Group:
    """Weights, or channels of several layers, that are pruned by one ranking.

    Args:
        kernels: kernels with functions from one number per weight to one per member.
        others: biases and the like that are zero where members are pruned.
        members: number of members.
        spare: how many members stay at least.
    """

    def __init__(self, kernels: Any, others: Any, members: int, spare: int) -> None:
        self.kernels, self.others, self.members = kernels, others, members
        self._spare = spare

    def masked(self) -> list[tuple[Any, Any]]:
        """Return all weights, with functions from one number per member to the weight's shape."""
        return [*((kernel, spread) for kernel, (_, spread) in self.kernels), *self.others]

    def least(self, share: float, by: Mapping[str, Any] | None) -> np.ndarray:
        """Return which members have the least importance."""
        scores = np.zeros(self.members)
        for kernel, (gather, _) in self.kernels:
            factor = 1.0 if by is None else np.asarray(by[kernel.path], np.float64)
            scores += gather(factor * np.square(np.asarray(kernel, np.float64)))
        count = min(round(share * self.members), self.members - self._spare)
        lost = np.zeros(self.members, bool)
        lost[np.argsort(scores, kind="stable")[:count]] = True
        return lost


def _single(model: Any) -> list[_Group]:
    """Return a group for each kernel, whose members are single weights."""
    kernels = {}
    for layer in layers_of(model):
        for name in _KERNELS:
            kernel = getattr(layer, name, None) if layer.built else None
            if isinstance(kernel, keras.Variable) and kernel.trainable and len(kernel.shape) > 1:
                kernels[id(kernel)] = kernel
    return [_alone(kernel) for kernel in kernels.values()]


def _alone(kernel: Any) -> _Group:
    shape = tuple(kernel.shape)
    functions = (np.ravel, lambda members: members.reshape(shape))
    return _Group([(kernel, functions)], [], int(np.prod(shape)), 0)


def _groups_of_channels(model: Any) -> list[_Group]:
    """Return groups of layers whose channels leave together."""
    channels, layers = Channels(model), operations(model)
    numbers = {name: channels.resolved(ends.outputs) for name, ends in channels.ends.items()}
    stay = channels.stay()
    of_kernels: dict[str, set[int]] = {}
    for name, own in numbers.items():
        layer, channels_of_it = layers[name], set(own.tolist())
        if not getattr(layer, "trainable", True):  # a frozen layer keeps its weights
            stay |= channels_of_it
        if kernel_of(layer) is not None:
            of_kernels[name] = channels_of_it
    # A layer that keeps some of its channels keeps all, and so do layers that are added to it.
    while some := [each for each in of_kernels.values() if stay & each and not each <= stay]:
        stay.update(*some)
    together: list[tuple[set[int], list[str]]] = []
    for name, of_kernel in of_kernels.items():
        if stay & of_kernel:
            continue
        mine, names = set(of_kernel), [name]
        for other in [each for each in together if each[0] & mine]:
            together.remove(other)
            mine, names = mine | other[0], [*other[1], *names]
        together.append((mine, names))
    return [_group(model, members, names, numbers, layers) for members, names in together]


def _group(model: Any, members: set[int], names: Any, numbers: Any, layers: Any) -> _Group:
    order = sorted(members)
    kernels, others = [], []
    for name, own in numbers.items():
        layer = layers[name]
        inside = np.isin(own, order)
        if not inside.any():
            continue
        places = np.minimum(np.searchsorted(order, own), len(order) - 1)
        own_kernel = kernel_of(layer) if name in names else None
        if own_kernel is not None:
            kernel = getattr(layer, own_kernel.attribute)
            axis = own_kernel.outputs % len(kernel.shape)
            kernels.append((kernel, _by_channel(places, axis, len(kernel.shape), len(order))))
        for attribute in ("bias", "gamma", "beta"):
            weight = getattr(layer, attribute, None)
            if weight is not None and weight.shape == own.shape:
                # Other channels of a concatenation belong to other groups.
                others.append((weight, lambda kept, at=places, own=inside: kept[at] | ~own))
    return _Group(kernels, others, len(order), 1)


def _by_channel(places: np.ndarray, axis: int, rank: int, count: int) -> Any:
    """Return functions between numbers per weight and per member of a group."""
    others = tuple(i for i in range(rank) if i != axis)
    shape = tuple(-1 if i == axis else 1 for i in range(rank))

    def gather(scores: np.ndarray) -> np.ndarray:
        return np.bincount(places, scores.sum(others), count)

    return gather, lambda kept: kept[places].reshape(shape)
