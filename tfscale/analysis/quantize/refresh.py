"""Wires by sensitivity that are chosen again while a model trains."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import keras

from tfscale.analysis.quantize.sensitivity import sensitivity
from tfscale.analysis.quantize.wires import BUDGET, WIRES, checked_names, wires as chosen_wires
from tfscale.bridge.fit import trace_again
from tfscale.bridge.installed import refuse_keras_2
from tfscale.exchange.scaling import Scaling, scaling
from tfscale.support import arguments
from tfscale.support.sizes import amount

_LOG = logging.getLogger("tfscale")


class RefreshWires(keras.callbacks.Callback):
    """Callback that chooses the wires of gradients again after every few epochs.

    At the end of an epoch, all replicas of all workers measure a study of the model together, so
    all get the same wires by ``quantize.wires``. They use them from the next step on; that step is
    traced anew. Residuals of error feedback stay with their variables.

    Args:
        x: inputs for the study: some hundreds of rows, or a dataset of batches.
        y: targets.
        every: number of epochs between two choices.
        budget: as for ``quantize.wires``.
        wires: names of the wires to choose from.
        samples: random vectors of a study.
        batch_size: rows of a global batch of the study, if data are arrays.

    Example:
        >>> strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"])
        >>> refresh = tfscale.quantize.RefreshWires(x, y, every=5, budget="40%")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(x, y, epochs=5, verbose=0, callbacks=[refresh])
        >>> len(refresh.policies)
        1
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        every: int,
        budget: float | str = "25%",
        wires: Iterable[str] = WIRES,
        samples: int = 8,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        refuse_keras_2("RefreshWires measures curvature")
        self._data = (
            arguments.data(x, "x"), arguments.optional(arguments.data, y, "y")
        )  # fmt: skip
        self._every = arguments.whole(every, "every", 1, what="a number of epochs")
        self._wires = checked_names(wires)
        amount(budget, "budget", BUDGET, 1)  # raises for a wrong one now, not after some epochs
        self._budget = budget
        self._samples = arguments.whole(samples, "samples", 1, what="a number of random vectors")
        self._batch_size = arguments.optional(
            arguments.whole, batch_size, "batch_size", 1, what="a number of rows"
        )
        self.policies: list[Any] = []  # one for each choice

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse strategies whose steps do not sum gradients by a policy of wires."""
        self._strategy()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Choose the wires again, if it is time."""
        if (epoch + 1) % self._every:
            return
        study = sensitivity(
            self.model, *self._data, bits=(8,), samples=self._samples, trained=True, progress=False,
            batch_size=self._batch_size,
        )  # fmt: skip
        policy = chosen_wires(study, self._budget, self._wires)
        self.policies.append(policy)
        reducer = self._strategy().reducer
        if policy != reducer.policy:
            reducer.change_policy(policy)
            trace_again(self.model)  # a step traced before has the old wires
            _LOG.info("gradients travel by other wires after epoch %d: %s", epoch + 1, policy)

    def _strategy(self) -> Scaling:
        strategy = scaling(self.model.distribute_strategy)
        if strategy is None:
            raise ValueError(
                f"RefreshWires changes the wires of a ScaleStrategy, and {self.model.name!r} was "
                "made outside of one: make it in the scope of tfscale.ScaleStrategy(wire=...)"
            )
        if strategy.figures_of_rounds():
            raise ValueError(
                "RefreshWires changes the wires of gradients, and the strategy's sync sends weights"
                " at the ends of rounds: leave out sync=, or the callback"
            )
        return strategy
