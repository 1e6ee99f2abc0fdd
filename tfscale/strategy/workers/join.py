"""Comparison of the workers' settings before they train together.

All workers must run the same program: otherwise they would wait for each other, or train a wrong
model without an error. Each worker sends the others a description of itself, a few words per
field, and raises an error if another worker's description differs. This costs one small exchange
at the start, and two at the start of each ``fit``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.objects import holds_layers, layers_of
from tfscale.bridge.protocols import Layer
from tfscale.exchange.packing import describe
from tfscale.native import Group, all_gather
from tfscale.support.version import __version__

_BYTES = 4096  # bytes of a description: equal for all, so that all workers can exchange them
_SHOWN = 60  # most characters of a value that are shown

_SAME_START = "Start all workers with the same packages, devices and arguments."
_SAME_MODEL = (
    "Build and compile the same model on all workers. If a worker builds other models too, build "
    "them after this one, or give names to all layers and optimizers."
)

_SAME_LENGTH = (
    "Call fit with the same arguments and the same number of batches on all workers. If their "
    "datasets differ in length, pass steps_per_epoch (and validation_steps)."
)
_UNKNOWN = ""  # agrees with any value

Description = Mapping[str, str]


def same_start(hosts: Group | None, settings: Mapping[str, Any]) -> None:
    """Raise if workers have different versions, devices or arguments.

    Args:
        hosts: group with one rank for each worker; None if there is only one worker.
        settings: this worker's settings, by name.
    """
    if hosts is None:
        return
    versions = {
        "version of tfscale": __version__,
        "version of TensorFlow": tf.version.VERSION,
        "version of Keras": keras.__version__,
    }
    _agree(hosts, "start", {**versions, **_words(settings)}, _SAME_START)


def same_model(hosts: Group | None, model: keras.Model) -> None:
    """Raise if workers train different models, or train a model differently."""
    if hosts is None:
        return
    _agree(hosts, "model", _describe(model), _SAME_MODEL)


def same_length(hosts: Group | None, length: Mapping[str, Any]) -> None:
    """Raise if ``fit`` has different numbers of epochs or steps, or validates on some workers only.

    Otherwise the worker with fewer steps would end, and the others would wait for it.
    """
    if hosts is None:
        return
    known = {name: value for name, value in length.items() if value is not None}
    own = {**dict.fromkeys(length, _UNKNOWN), **_words(known)}
    _agree(hosts, "length of fit", own, _SAME_LENGTH)


def _describe(model: keras.Model) -> Description:
    """Return what workers must have in common to train a model together."""
    weights = [describe(v) for v in model.trainable_variables]
    optimizer = model.optimizer
    return _words(
        {
            "class of the model": type(model).__name__,
            "number of trainable weights": sum(int(np.prod(w.shape)) for w in weights),
            "list of weights' shapes": [w.shape for w in weights],
            "list of layers": [_layer(layer) for layer in layers_of(model)],
            "loss": model.loss,
            "optimizer": optimizer and type(optimizer).__name__,
            "list of weights' names": [describe(v).path for v in model.trainable_variables],
            "name of the optimizer": optimizer and optimizer.name,
            "steps_per_execution": model.steps_per_execution,
            **{f"{name} of the optimizer": v for name, v in _config(optimizer).items()},
        }
    )


def _layer(layer: Layer) -> Any:
    """Return a layer's class and configuration.

    The configuration of a layer that holds other layers is left out: it contains their names, and
    they are described separately.
    """
    return type(layer).__name__, {} if holds_layers(layer) else _config(layer)


def _config(thing: Any) -> Any:
    """Return a configuration without names and seeds, which may differ between workers.

    Keras numbers names within a process, and draws seeds in each process.
    """
    try:
        config = thing.get_config() if thing is not None else {}
    except NotImplementedError:  # a class of the user's own
        return {}
    return {key: value for key, value in config.items() if key not in ("name", "seed")}


def _words(fields: Mapping[str, Any]) -> Description:
    """Return values as texts; a long text is cut, and gets a digest of the whole text."""
    return {name: _short(_text(value)) for name, value in fields.items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=_named)


def _named(value: Any) -> str:
    # An object's repr may hold its address, which differs between processes.
    if isinstance(value, np.generic):
        return repr(value.item())
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _short(text: str) -> str:
    if len(text) <= _SHOWN:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{text[:_SHOWN]}... (digest {digest})"


def _agree(hosts: Group, what: str, own: Description, remedy: str) -> None:
    descriptions = _exchanged(hosts, what, own)
    first = descriptions[0]
    for peer, other in zip(hosts.peers[1:], descriptions[1:], strict=True):
        for name in [*first, *(name for name in other if name not in first)]:
            if _differ(first.get(name), other.get(name)):
                raise ValueError(
                    f"workers differ in their {name}: {peer} has {other.get(name)}, and "
                    f"{hosts.peers[0]} has {first.get(name)}. {remedy}"
                )


def _differ(one: str | None, other: str | None) -> bool:
    return one != other and _UNKNOWN not in (one, other)


def _exchanged(hosts: Group, what: str, own: Description) -> list[Description]:
    """Return the descriptions of all workers."""
    sent = np.frombuffer(_packed(own), np.int32)
    rows = exchanged(hosts, f"the description of the {what}", sent)
    return [_unpacked(row.tobytes(), peer) for row, peer in zip(rows, hosts.peers, strict=True)]


def exchanged(hosts: Group, what: str, own: np.ndarray) -> np.ndarray:
    """Return the arrays of all workers, which are of one shape; all workers call this."""
    (me,) = hosts.communicators
    words = own.reshape(-1).view(np.int32)
    with tf.device(me.device):
        every = all_gather(words, me, name=what)
    return np.ascontiguousarray(every.numpy()).view(own.dtype).reshape(hosts.ranks, *own.shape)


def have_all(hosts: Group | None, what: str, has: bool) -> bool:
    """Return whether there are several workers, and all of them have something."""
    return hosts is not None and bool(exchanged(hosts, what, np.array([has], np.int32)).all())


def _packed(description: Description) -> bytes:
    data = json.dumps(description).encode()
    if len(data) > _BYTES:
        raise ValueError(f"a description has {_BYTES} bytes, got {len(data)}")
    return data.ljust(_BYTES)


def _unpacked(data: bytes, peer: str) -> Description:
    """Return the description in a worker's message.

    Raises:
        ValueError: the message is no description; that worker may run any program.
    """
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{peer} sent no description of itself: {error}") from None
    if not isinstance(found, dict) or not _all_text([*found, *found.values()]):
        raise ValueError(f"{peer} sent no description of itself, but {str(found)[:_SHOWN]!r}")
    return found


def _all_text(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
