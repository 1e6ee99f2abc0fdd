"""Residuals, what rounding on wires has lost and later steps will send: saved with the optimizer.

They are attributes of an optimizer, and are saved wherever it is: in ``tf.train.Checkpoint``, in
``.keras`` and ``.weights.h5`` files, by ``BackupAndRestore``. Where no wire needs it,
nothing more is saved than without a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from tfscale.bridge.objects import LAYER_SEED, Saveable
from tfscale.bridge.protocols import Model, Optimizer

# The names of variables, by which a strategy knows them.
RESIDUAL = "tfscale_residual"
ROUNDING_SEED = "tfscale_rounding_seed"

ATTRIBUTE = "_tfscale_memory"  # as checkpoints and files call it

# Not a dict, for those TensorFlow takes for variables to save.
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ExchangeState(tf.Module, Saveable):
    """Residuals, the seed of stochastic rounding, and the seeds of the model's layers.

    Keras itself saves no seeds, so an interrupted training would go on with other dropout
    masks than one that was never interrupted.

    A variable is identified by its place in the optimizer: if a model is built twice in one
    process, its variables have other names the second time.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="memory")
        self._strategy = strategy
        self._residuals: dict[str, Any] = {}
        self._layer_seeds: dict[str, Any] = {}
        self._rounding_seed: Any = None
        self._early_seeds: Mapping[str, Any] = _NOTHING

    @classmethod
    def of(cls, optimizer: Optimizer, strategy: tf.distribute.Strategy) -> ExchangeState:
        """The state of an optimizer; it gets one if it has none."""
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

    def has(self, places: Iterable[str], rounding: bool) -> bool:
        """Whether ``prepare`` has nothing to do."""
        rounds = self._rounding_seed is not None or not rounding
        return rounds and self._residuals.keys() >= set(places)

    def prepare(self, shapes: Mapping[str, Sequence[int]], rounding: bool) -> None:
        """Make what is missing, before the first step and outside of replicas.

        Args:
            shapes: of the variables whose losses are remembered, by their places.
            rounding: whether a wire rounds at random.
        """
        with tf.init_scope(), self._strategy.scope():
            if rounding and self._rounding_seed is None:
                self._rounding_seed = tf.Variable(
                    0, dtype=tf.int64, trainable=False, name=ROUNDING_SEED
                )
            for place in sorted(shapes.keys() - self._residuals.keys()):
                zeros = tf.zeros(shapes[place], tf.float32)
                self._residuals[place] = tf.Variable(zeros, trainable=False, name=RESIDUAL)

    def residual(self, place: str, replica: int) -> tf.Variable:
        """What one replica's gradients of a variable have lost."""
        return self._residuals[place].values[replica]

    def next_seed(self, replica: int) -> tf.Tensor:
        """A seed: another one for each bucket and step, the same on all replicas."""
        return self._rounding_seed.values[replica].assign_add(1, read_value=True).read_value()

    def _obj_type(self) -> str:
        return "Loss"  # to Keras: something with state and no children

    def save_own_variables(self, store: Any) -> None:
        """Called by Keras."""
        for kind, variables in self._kinds().items():
            for place, variable in sorted(variables.items()):
                store[f"{kind} {place}"] = variable.numpy()
        for place, seed in self._early_seeds.items():
            store[f"layer seed {place}"] = seed

    def load_own_variables(self, store: Any) -> None:
        """Called by Keras. What a file does not hold begins anew."""
        saved = {key: store[key][()] for key in list(store.keys())}
        shapes = {place: rows.shape[1:] for place, rows in _of("residual", saved).items()}
        self.prepare(shapes, rounding=bool(_of("rounding seed", saved)))
        for kind, variables in self._kinds().items():
            for place, variable in variables.items():
                if f"{kind} {place}" in saved:
                    variable.assign(saved[f"{kind} {place}"])
                elif kind == "residual":
                    variable.assign(tf.zeros_like(variable.numpy()))
        # A model that is being loaded is not watched yet.
        if not self._layer_seeds:
            self._early_seeds = MappingProxyType(_of("layer seed", saved))

    def _kinds(self) -> dict[str, dict[str, Any]]:
        rounding = {} if self._rounding_seed is None else {"0": self._rounding_seed}
        return {
            "residual": dict(self._residuals),
            "layer seed": dict(self._layer_seeds),
            "rounding seed": rounding,
        }


def _of(kind: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What was saved of a kind, by place."""
    return {
        key.removeprefix(f"{kind} "): value for key, value in saved.items() if key.startswith(kind)
    }
