"""Recording of the operations that a model's layers make while its training step is traced.

During the recording, hooks are on the ``call`` of the model and its layers, and on the optimizer's
``apply_gradients``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import APPLY_GRADIENTS, LAYER_CALL
from tfscale.bridge.objects import layers_of
from tfscale.training.recompute.traced_step import Piece


@dataclass
class Forward:
    """A forward pass in a graph: the places in the graph's list where the running layers change."""

    graph: tf.Graph
    device: str | None
    events: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def note(self, layers: list[str]) -> None:
        """Note that these layers run from here on."""
        self.events.append((len(self.graph.get_operations()), tuple(layers)))

    def pieces(self) -> list[Piece]:
        """Return the forward pass, cut where the running layers change; some pieces are empty."""
        pairs = zip(self.events, self.events[1:])
        return [Piece(layers, start, stop) for (start, layers), (stop, _) in pairs]


WhenDifferentiated = Callable[[Forward, list[Any]], None]


class Watch:
    """A recorder of forward passes, which reports them once their gradients have been computed.

    Args:
        model: a compiled Keras model.
        then: receives the forward pass and its gradients, before the optimizer does.
    """

    def __init__(self, model: keras.Model, then: WhenDifferentiated) -> None:
        self._model = model
        self._then = then
        self._now = threading.local()  # each replica is traced in its own thread

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Record the steps that are traced in this context."""
        with contextlib.ExitStack() as stack:
            for layer in parts_of(self._model):
                stack.enter_context(LAYER_CALL.on(layer, self._in_layer))
            stack.enter_context(LAYER_CALL.on(self._model, self._in_model))
            stack.enter_context(APPLY_GRADIENTS.on(self._model.optimizer, self._apply_gradients))
            yield

    def _in_model(self, call: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or self._runs():
            return call(model, *args, **kwargs)
        return self._in_whole("forward", call, model, *args, **kwargs)

    def _in_layer(self, call: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return call(layer, *args, **kwargs)
        if not self._runs():
            return self._in_whole("parts", call, layer, *args, **kwargs)
        forward: Forward = self._now.running
        if not _is_current(forward.graph):
            return call(layer, *args, **kwargs)
        self._now.layers.append(layer.name)
        forward.note(self._now.layers)
        try:
            return call(layer, *args, **kwargs)
        finally:
            self._now.layers.pop()
            forward.note(self._now.layers)

    def _runs(self) -> bool:
        return bool(getattr(self._now, "layers", None))

    def _in_whole(self, kind: str, call: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call that no other layer makes.

        Args:
            kind: "forward" for the model, "parts" for a layer of it. A step of the user's own may
                call the model's parts, an encoder and a decoder, and never the model itself.
            call: the layer's own ``call``.
            layer: the model or the layer.
            args: its arguments.
            kwargs: its arguments by name.
        """
        graph = tf.compat.v1.get_default_graph()
        seen: Forward | None = getattr(self._now, kind, None)
        known = seen is not None and seen.graph is graph
        forward = seen if seen and known else Forward(graph, _device_of_replica())
        setattr(self._now, kind, forward)
        self._now.running = forward
        self._now.layers = [layer.name]
        forward.note(self._now.layers)
        try:
            return call(layer, *args, **kwargs)
        finally:
            self._now.layers = []
            forward.note([])

    def _apply_gradients(
        self, apply: Any, optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        both = (getattr(self._now, kind, None) for kind in ("forward", "parts"))
        forward = next((one for one in both if one and _is_current(one.graph)), None)
        if forward:
            self._now.forward = self._now.parts = None
            self._then(forward, [gradient for gradient, _ in pairs])
        return apply(optimizer, pairs, *args, **kwargs)


def parts_of(model: keras.Model) -> list[Any]:
    """Return all named objects that run within a model: layers, and operations of its graph."""
    found: dict[int, Any] = {}
    for layer in [model, *layers_of(model)]:
        for one in [layer, *getattr(layer, "operations", ())]:
            found[id(one)] = one
    found.pop(id(model))
    return list(found.values())


def _is_current(graph: tf.Graph) -> bool:
    return graph is tf.compat.v1.get_default_graph()


def _device_of_replica() -> str | None:
    """Return the device of this replica, if this process has several replicas."""
    if not tf.distribute.has_strategy():
        return None
    if len(tf.distribute.get_strategy().extended.worker_devices) == 1:
        return None
    return str(tf.no_op("again/here").device)
