"""State that methods keep from step to step, such as residuals; it is saved with the optimizer.

A residual is what rounding on a wire has lost and later steps will send. The residual belongs to
the optimizer, and is saved wherever the optimizer is saved: in ``tf.train.Checkpoint``, in
``.keras`` and ``.weights.h5`` files, by ``BackupAndRestore``. If no method keeps any state, files
hold no more than without a strategy.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfscale.bridge.objects import LAYER_SEED, Saveable
from tfscale.bridge.protocols import Model, Optimizer
from tfscale.compression.method import RESIDUAL, Kept
from tfscale.exchange import shards

_log = logging.getLogger("tfscale")

# Names by which a strategy recognizes its variables.
PART = "tfscale_part"  # a part of a sum, different on each replica
COMMON = "tfscale_common"  # a value that is equal on all replicas
SHARD = "tfscale_shard"  # a shard of a common value: each replica holds a part
ROUNDING_SEED = "tfscale_rounding_seed"

# These variables begin with the same value on every worker. Some are made while the first step is
# traced; if replicas make that step without communication, the first worker cannot send its value.
BEGINS_ALIKE = (PART, COMMON, SHARD, ROUNDING_SEED)

ATTRIBUTE = "_tfscale_memory"  # its name in checkpoints and files

_OUTER = "outer optimizer"

# This is not a dict, because TensorFlow takes a dict for variables to save.
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ExchangeState(tf.Module, Saveable):
    """State of the methods, the seed that they share, and the seeds of the model's layers.

    Keras itself saves no seeds. Without these seeds, an interrupted training would go on with other
    dropout masks than an uninterrupted training.

    The place in the optimizer identifies a variable. The name would not: if a model is built twice
    in one process, its variables have other names the second time.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="memory")
        self._strategy = strategy
        self._layer_seeds: dict[str, Any] = {}
        self._rounding_seed: Any = None
        self._early_seeds: Mapping[str, Any] = _NOTHING
        self.outer: Any = None  # an optimizer whose variables are saved as well
        self.make_outer: Callable[[], Any] = lambda: None  # makes a fresh outer optimizer
        self.in_shards: tuple[str, ...] = ()  # names of common state that is held in shards
        # By name and place: the weight that equals the state while all replicas agree.
        self.weight_of: Callable[[str, str], Any] = lambda name, place: None
        self.anew: frozenset[str] = frozenset()  # names that the last loaded file lacked
        self.after_loading: Callable[[], None] = lambda: None  # called after a file is loaded
        # By name and place, in a namespace: TensorFlow would take a dict for variables to save.
        self._own = types.SimpleNamespace(described={})

    @classmethod
    def of(cls, optimizer: Optimizer, strategy: tf.distribute.Strategy) -> ExchangeState:
        """Return the state of an optimizer, after making it if there is none."""
        state = getattr(optimizer, ATTRIBUTE, None)
        if state is None:
            state = cls(strategy)
            setattr(optimizer, ATTRIBUTE, state)
        return state

    def watch(self, model: Model) -> None:
        """Save the seeds of this model's layers, too."""
        seeds = [v.value for v in model.variables if v.path.endswith(LAYER_SEED)]
        for place, seed in enumerate(seeds):
            self._layer_seeds[str(place)] = seed
            if str(place) in self._early_seeds:
                seed.assign(self._early_seeds[str(place)])
        self._early_seeds = _NOTHING

    def has(self, wanted: Mapping[tuple[str, str], Kept], rounding: bool) -> bool:
        """Return whether ``prepare`` has nothing to do."""
        rounds = self._rounding_seed is not None or not rounding
        return rounds and all(self._own.described.get(key) == wanted[key] for key in wanted)

    def prepare(self, wanted: Mapping[tuple[str, str], Kept], rounding: bool) -> None:
        """Make the missing variables, before the first step and outside of replicas.

        Args:
            wanted: descriptions of the state, by its name and the variable's place.
            rounding: whether a method draws seeds.
        """
        with tf.init_scope(), self._strategy.scope():
            if rounding and self._rounding_seed is None:
                self._rounding_seed = tf.Variable(
                    0, dtype=tf.int64, trainable=False, name=ROUNDING_SEED
                )
            for (name, place), kept in sorted(wanted.items(), key=lambda item: item[0]):
                old = self._own.described.get((name, place))
                if old is None or (old.shape, old.common) != (kept.shape, kept.common):
                    self._of(name)[place] = self._made(name, place, kept)
                self._own.described[name, place] = kept

    def _made(self, name: str, place: str, kept: Kept) -> Any:
        if name not in self.in_shards:
            start = tf.constant(kept.start(kept.shape), tf.float32)
            return tf.Variable(start, trainable=False, name=COMMON if kept.common else PART)
        each = shards.size(kept.shape, self._strategy.extended.number_of_replicas)
        shard = tf.Variable(tf.zeros([each]), trainable=False, name=SHARD)
        shard.whole_shape, shard.weight = kept.shape, self.weight_of(name, place)
        return shard

    def _of(self, name: str) -> dict[str, Any]:
        """Return the variables of this name by place, in an attribute that TensorFlow saves."""
        attribute = "_residuals" if name == RESIDUAL else f"_kept_{name}"
        if not hasattr(self, attribute):
            setattr(self, attribute, {})
        return getattr(self, attribute)  # type: ignore[no-any-return]

    def kept(self, name: str, place: str, replica: int) -> tf.Variable:
        """Return one replica's state of this name for a variable."""
        return self.whole(name, place).values[replica]

    def whole(self, name: str, place: str) -> Any:
        """Return the state of this name for a variable, with the values of all replicas."""
        return self._of(name)[place]

    def next_seed(self, replica: int) -> tf.Tensor:
        """Return a seed that is new for each bucket and step, and equal on all replicas."""
        return self._rounding_seed.values[replica].assign_add(1, read_value=True).read_value()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Return the objects to save; TensorFlow calls this method.

        A SavedModel gets none of them: a program that loads a SavedModel does not continue its
        training.
        """
        return {} if save_type == "savedmodel" else super()._trackable_children(save_type, **kwargs)

    def _obj_type(self) -> str:
        return "Loss"  # Keras takes this for an object with state and without children

    def save_own_variables(self, store: Any) -> None:
        """Save the state in a store; Keras calls this method."""
        for kind, variables in self._kinds().items():
            for place, variable in sorted(variables.items()):
                store[f"{kind} {place}"] = variable.numpy()
        for place, seed in self._early_seeds.items():
            store[f"layer seed {place}"] = seed

    def load_own_variables(self, store: Any) -> None:
        """Load the state from a store; Keras calls this method.

        State that the store does not hold begins anew.
        """
        saved = {key: store[key][()] for key in list(store.keys())}
        saved = self._of_these_shapes(saved)
        self.prepare(_described(saved), rounding=bool(_of("rounding seed", saved)))
        for kind, variables in self._kinds().items():
            for place, variable in variables.items():
                if f"{kind} {place}" in saved:
                    variable.assign(saved[f"{kind} {place}"])
        if self.outer is not None and not _of(_OUTER, saved) and self.outer.iterations.numpy():
            self._begin_outer_anew()
        anew = set()
        for (name, place), kept in self._own.described.items():
            if not saved.keys() & {f"{name} {place}", f"common {name} {place}"}:
                self._begin_anew(name, place, kept)
                anew.add(name)
        if self._rounding_seed is not None and not _of("rounding seed", saved):
            self._rounding_seed.assign(0)
        # Nobody watches a model while it is loaded: keep its seeds for ``watch``.
        if not self._layer_seeds:
            self._early_seeds = MappingProxyType(_of("layer seed", saved))
        self.anew = frozenset(anew)
        self.after_loading()

    def _of_these_shapes(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the saved state without entries of other shapes than this method's state.

        A method with other arguments has saved them. The variables cannot change their shapes,
        because steps may be traced already.
        """
        described = self._own.described
        others = [
            f"{'common ' * kept.common}{name} {place}"
            for (name, place), kept in _described(saved).items()
            if (name, place) in described and described[name, place].shape != kept.shape
        ]
        if others:
            _log.warning(
                "What was kept of %s has another shape than this method keeps, and begins anew: "
                "the file comes from another method, or from one with other arguments.",
                ", ".join(map(repr, others)),
            )
        return {key: value for key, value in saved.items() if key not in others}

    def _begin_anew(self, name: str, place: str, kept: Kept) -> None:
        start = kept.start(kept.shape)
        rows = (self._strategy.extended.number_of_replicas, *kept.shape)
        self._of(name)[place].assign(start if kept.common else np.broadcast_to(start, rows))

    def _begin_outer_anew(self) -> None:
        fresh = self.make_outer()
        for variable, value in zip(self.outer.variables, fresh.variables, strict=True):
            variable.assign(value.numpy())

    def _kinds(self) -> dict[str, dict[str, Any]]:
        rounding = {} if self._rounding_seed is None else {"0": self._rounding_seed}
        kinds: dict[str, dict[str, Any]] = {
            "layer seed": dict(self._layer_seeds),
            "rounding seed": rounding,
        }
        if self.outer is not None:
            kinds[_OUTER] = {str(i): v for i, v in enumerate(self.outer.variables)}
        for (name, place), kept in self._own.described.items():
            kind = f"common {name}" if kept.common else name
            kinds.setdefault(kind, {})[place] = self._of(name)[place]
        return kinds


def _described(saved: Mapping[str, Any]) -> dict[tuple[str, str], Kept]:
    """Return descriptions of the state in a file; the file does not hold how the state began."""
    found = {}
    for key, value in saved.items():
        if not key.startswith(("layer seed ", "rounding seed ", f"{_OUTER} ")):
            common = key.startswith("common ")
            name, _, place = key.removeprefix("common ").partition(" ")
            found[name, place] = Kept(tuple(value.shape[0 if common else 1 :]), common)
    return found


def _of(kind: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved values of one kind, by place."""
    return {
        key.removeprefix(f"{kind} "): value for key, value in saved.items() if key.startswith(kind)
    }
