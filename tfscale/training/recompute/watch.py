"""Recording of the operations that a model's layers make while its training step is traced.

During the recording, hooks are on the ``call`` of the model and its layers. When a step calls the
first one, hooks follow on the optimizers' ``apply`` and on ``tf.GradientTape.gradient``.

A step has one phase for each forward pass whose gradients an optimizer applies before the next
forward pass: a GAN's discriminator learns in one phase, and its generator in another one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.hooks import APPLY, LAYER_CALL, TAPE_GRADIENT, ActiveHook
from tfscale.bridge.objects import layers_of, optimizers_of
from tfscale.training.recompute.traced_step import Piece


@dataclass
class Forward:
    """A forward pass in a graph.

    Args:
        graph: the graph.
        device: device of the replica, if this process has several replicas.
        events: places in the graph's list of operations where the running layers change.
        phase: number of earlier phases of the step.
        since: number of operations that were made before this phase, if it is not the first one.
        applied: operations with which the phase before applied its gradients.
    """

    graph: tf.Graph
    device: str | None
    events: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    phase: int = 0
    since: int = 0
    applied: range = range(0)

    def note(self, layers: list[str]) -> None:
        """Note that these layers run from here on."""
        self.events.append((len(self.graph.get_operations()), tuple(layers)))

    def pieces(self) -> list[Piece]:
        """Return the forward pass, cut where the running layers change; some pieces are empty."""
        pairs = zip(self.events, self.events[1:])
        return [Piece(layers, start, stop) for (start, layers), (stop, _) in pairs]

    def next_phase(self, applied: range) -> Forward:
        """Return the forward pass of the next phase, without events.

        Args:
            applied: operations with which this phase applies its gradients.
        """
        return replace(self, events=[], phase=self.phase + 1, since=applied.stop, applied=applied)


WhenDifferentiated = Callable[[Forward, list[Any]], None]


class _Now(threading.local):
    """The step that is being traced; each replica is traced in its own thread.

    Attributes:
        graph: the graph of the step.
        hooks: hooks on optimizers and tapes during this step.
        layers: names of the running layers, from outer to inner.
        running: the forward pass that the running layers belong to.
        forward: the forward pass of the model's own calls.
        parts: the forward pass of calls of layers outside the model's own calls.
        next: an empty forward pass: that of the phase that begins with the next call.
        done: the forward pass of the phase before, whose gradients were applied.
        gradients: what tapes returned in this phase, and the variable of each.
        called: whether a layer was called since a tape last computed gradients of variables.
        differentiates: whether a tape is computing gradients.
    """

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.running: Forward | None = None
        self.graph: tf.Graph | None = None
        self.hooks: list[ActiveHook] = []
        self.differentiates = False
        self.begin()

    def begin(self) -> None:
        """Begin a step, or its next phase."""
        self.forward: Forward | None = None
        self.parts: Forward | None = None
        self.next: Forward | None = None
        self.done: Forward | None = None
        self.gradients: list[tuple[Any, Any]] = []
        self.called = False


class Watch:
    """A recorder of forward passes, which reports them once their gradients have been computed.

    Args:
        model: a compiled Keras model.
        then: receives the forward pass and its gradients, before the optimizer does.
        applies: whether optimizers apply the gradients; otherwise the trace goes on without that.
    """

    def __init__(self, model: keras.Model, then: WhenDifferentiated, applies: bool = True) -> None:
        self._model = model
        self._then = then
        self._applies = applies
        self._now = _Now()
        self._hooks: list[ActiveHook] = []  # of all threads

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Record the steps that are traced in this context."""
        with contextlib.ExitStack() as stack:
            for layer in parts_of(self._model):
                stack.enter_context(LAYER_CALL.on(layer, self._in_layer))
            stack.enter_context(LAYER_CALL.on(self._model, self._in_model))
            try:
                yield
            finally:
                for hook in self._hooks:
                    hook.off()

    def _watch_step(self, graph: tf.Graph) -> None:
        """Watch tapes and optimizers while a step is traced into a graph.

        A strategy has its hooks on them by now, so these are called before it: they get what the
        step itself computes, and the strategy what other replicas compute, too.
        """
        for hook in self._now.hooks:
            hook.off()
        self._now.begin()
        self._now.graph = graph
        self._now.hooks = [
            TAPE_GRADIENT.put(tf.GradientTape, self._gradient, in_thread=True),
            *(APPLY.put(one, self._apply, in_thread=True) for one in optimizers_of(self._model)),
        ]
        self._hooks += self._now.hooks

    def _in_model(self, call: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or self._runs():
            return call(model, *args, **kwargs)
        return self._in_whole("forward", call, model, *args, **kwargs)

    def _in_layer(self, call: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            return call(layer, *args, **kwargs)
        if not self._runs():
            return self._in_whole("parts", call, layer, *args, **kwargs)
        forward = self._now.running
        if forward is None or not _is_current(forward.graph):
            return call(layer, *args, **kwargs)
        self._now.layers.append(layer.name)
        forward.note(self._now.layers)
        try:
            return call(layer, *args, **kwargs)
        finally:
            self._now.layers.pop()
            forward.note(self._now.layers)

    def _runs(self) -> bool:
        return bool(self._now.layers)

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
        forward: Forward | None = getattr(self._now, kind)
        if forward is None or not _is_current(forward.graph):
            forward = self._begun()
            setattr(self._now, kind, forward)
        self._now.running = forward
        self._now.called = True
        self._now.layers = [layer.name]
        forward.note(self._now.layers)
        try:
            return call(layer, *args, **kwargs)
        finally:
            self._now.layers = []
            forward.note([])

    def _begun(self) -> Forward:
        """Return the forward pass of a call that is about to begin, without events."""
        graph = tf.compat.v1.get_default_graph()
        if self._now.graph is not graph:
            self._watch_step(graph)
        if self._now.next is not None:
            return replace(self._now.next, events=[])
        return Forward(graph, _device_of_replica())

    def _gradient(
        self, gradient: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inner, self._now.differentiates = self._now.differentiates, True
        try:
            result = gradient(tape, target, sources, *args, **kwargs)
        finally:
            self._now.differentiates = inner
        pairs = zip(tf.nest.flatten(sources), tf.nest.flatten(result))
        found = [pair for pair in pairs if isinstance(pair[0], (keras.Variable, tf.Variable))]
        if found and inner:
            raise ValueError(
                f"{self._model.name} has a gradient that computes gradients of variables with a "
                "tape of its own, as that of tf.recompute_grad does. Recompute cannot follow such "
                "a gradient. Call the function without tf.recompute_grad: Recompute frees its "
                "results, too, and computes them again"
            )
        if found and not self._now.called:
            raise ValueError(
                f"{type(self._model).__name__}.train_step computes gradients twice without a "
                "forward pass between, and Recompute follows one backward pass for each forward "
                "pass. Call the layers again for the second gradients, or compute both by one call "
                "of tape.gradient"
            )
        if found:
            self._now.called = False
        self._now.gradients += found
        return result

    def _apply(
        self,
        apply: Any,
        optimizer: Any,
        grads: Any,
        trainable_variables: Any = None,
        **kwargs: Any,
    ) -> Any:
        grads, variables = list(grads), list(trainable_variables or ())
        both = (self._now.forward, self._now.parts)
        forward = next((one for one in both if one and _is_current(one.graph)), None)
        begun = _made()
        if forward:
            self._then(forward, [*grads, *self._for_others(forward.graph, grads, variables)])
            self._now.begin()
            self._now.done = forward
        elif self._now.next is not None:  # gradients of the same phase for another optimizer
            begun = self._now.next.applied.start
        result = optimizer.iterations
        if self._applies:
            result = apply(optimizer, grads, trainable_variables, **kwargs)
        if self._now.done is not None:
            self._now.next = self._now.done.next_phase(range(begun, _made()))
        return result

    def _for_others(self, graph: tf.Graph, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients that tapes returned for other optimizers, or other updates.

        A gradient of one of the variables from which others were computed is of the same update:
        it was clipped, for example.
        """
        given, mine = set(map(id, grads)), set(map(id, variables))
        return [
            gradient
            for variable, gradient in self._now.gradients
            if id(gradient) not in given
            and getattr(gradient, "graph", None) is graph
            and (id(variable) not in mine or _is_unused(gradient))
        ]


def _is_unused(gradient: Any) -> bool:
    tensors = tf.nest.flatten(gradient, expand_composites=True)
    return not any(one.consumers() for one in tensors)


def parts_of(model: keras.Model) -> list[Any]:
    """Return all named objects that run within a model: layers, and operations of its graph."""
    found: dict[int, Any] = {}
    for layer in [model, *layers_of(model)]:
        for one in [layer, *getattr(layer, "operations", ())]:
            found[id(one)] = one
    found.pop(id(model))
    return list(found.values())


def _made() -> int:
    """Return how many operations the current graph has."""
    return len(tf.compat.v1.get_default_graph().get_operations())


def _is_current(graph: tf.Graph) -> bool:
    return graph is tf.compat.v1.get_default_graph()


def _device_of_replica() -> str | None:
    """Return the device of this replica, if this process has several replicas."""
    if not tf.distribute.has_strategy():
        return None
    if len(tf.distribute.get_strategy().extended.worker_devices) == 1:
        return None
    return str(tf.no_op("again/here").device)
