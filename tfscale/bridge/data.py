"""Data in batches, as Keras's ``evaluate`` reads it, once or many times."""

from __future__ import annotations

import collections.abc
import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import NO_METRICS, NO_OPTIMIZER
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.losses import compiled_loss
from tfscale.bridge.objects import build_on, layers_of

if not KERAS_2:
    from keras.src.trainers.data_adapters import get_data_adapter

_ONE_SHOT = (
    "{who} reads its data many times, and a {kind} can be read once: give arrays, a "
    "tf.data.Dataset, or a keras.utils.PyDataset"
)
_ENDLESS = (
    "{who} reads all of its data for each product, and this dataset has no end: give steps=..., "
    "the number of batches to read"
)


class Batches:
    """The batches of some data, in the same order each time, each a part for every replica.

    Args:
        model: a model; its strategy hands the batches out.
        data: ``x``, ``y`` and ``sample_weight``, as ``evaluate`` takes them.
        batch_size: global, of arrays.
        steps: how many batches to read; None for all.
        who: reads them, for messages.
    """

    def __init__(
        self, model: Any, data: tuple[Any, Any, Any], batch_size: int | None, steps: int | None,
        who: str,
    ) -> None:  # fmt: skip
        x, y, sample_weight = data
        if isinstance(x, collections.abc.Iterator):
            raise ValueError(_ONE_SHOT.format(who=who, kind=type(x).__name__))
        self._adapter = get_data_adapter(
            x, y=y, sample_weight=sample_weight, batch_size=batch_size, steps_per_epoch=steps
        )
        dataset = self._adapter.get_tf_dataset()
        is_endless = bool(dataset.cardinality() == tf.data.INFINITE_CARDINALITY)
        if steps is None and (is_endless or isinstance(x, keras.utils.PyDataset)):
            steps = self._adapter.num_batches
            if steps is None:
                raise ValueError(_ENDLESS.format(who=who))
        if steps is not None:
            dataset = dataset.take(steps)
        self._spec = dataset.element_spec
        self._dataset = model.distribute_strategy.experimental_distribute_dataset(dataset)

    @property
    def have_targets(self) -> bool:
        """Whether a batch holds more than inputs."""
        spec = self._spec
        return isinstance(spec, tuple) and len(spec) > 1 and spec[1] is not None

    def build(self, model: Any) -> None:
        """Build a model and its loss as ``fit`` would, if nobody has; not its optimizer."""
        layers = [model, *layers_of(model)]
        losses = compiled_loss(model)
        if all(layer.built for layer in layers) and (losses is None or losses.built):
            return
        others = NO_OPTIMIZER.showing(model, None), NO_METRICS.showing(model, None)
        with others[0], others[1], model.distribute_strategy.scope():
            build_on(model, self._spec)

    def __iter__(self) -> Iterator[Any]:
        with _epoch(self._adapter):
            yield from self._dataset


def batches_of(
    x: Any, y: Any = None, batch_size: int | None = None, steps: int | None = None
) -> Iterator[Any]:
    """Yield the batches of data once, as ``predict`` and ``evaluate`` read them."""
    adapter = get_data_adapter(x, y=y, batch_size=batch_size, steps_per_epoch=steps)
    with _epoch(adapter):
        dataset = adapter.get_tf_dataset()
        yield from dataset if steps is None else dataset.take(steps)


@contextlib.contextmanager
def _epoch(adapter: Any) -> Iterator[None]:
    """Tell a data adapter of an epoch, whose end it must hear also after an error."""
    adapter.on_epoch_begin()
    try:
        yield
    finally:
        adapter.on_epoch_end()
