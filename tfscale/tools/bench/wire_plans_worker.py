"""One worker of the part ``wires`` of ``tfscale bench quantize``.

Usage: ``python -m tfscale.tools.bench.wire_plans_worker FILE TASK SEEDS``. The first worker writes
results to FILE, where ``Kept`` finds them.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tfscale.tools.bench.kept import Kept
from tfscale.tools.bench.wire_plans import TASKS, WIRES, Task, key

_BATCH, _ROWS = 40, 250
_SAMPLES = 16  # random vectors of a study


class Trainer:
    """A net, which is trained with one policy after another from the same weights."""

    def __init__(self, task: Task) -> None:
        import keras

        import tfscale

        self._task, (self._train, self._test) = task, task.data()
        self._strategy = tfscale.ScaleStrategy()
        with self._strategy.scope():
            self._model = task.build()
            self._model.compile(
                keras.optimizers.SGD(
                    keras.optimizers.schedules.CosineDecay(task.rate, 1), momentum=0.9
                ),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                jit_compile=False,
            )
            self._model.optimizer.build(self._model.trainable_variables)
        self._begin = [variable.numpy() for variable in self._model.optimizer.variables]

    def results(self, seed: int) -> dict[str, Any]:
        """Return the losses of all policies, with planned and counted bytes of a step."""
        import keras

        from tfscale.analysis.quantize import sensitivity, wires
        from tfscale.collectives.wires import nbytes
        from tfscale.compression import WirePolicy

        keras.utils.set_random_seed(seed)
        self._model.set_weights(self._task.build().get_weights())
        self._fit(WirePolicy("fp32"), seed, self._task.before)
        begin = self._model.get_weights()
        study = sensitivity(
            self._model, *self._train, bits=(8,), samples=_SAMPLES, trained=True, progress=False,
            batch_size=_ROWS,
        )  # fmt: skip
        known: dict[tuple[str, ...], Any] = {}

        def after(policy: Any) -> Any:
            # The same wires from the same weights are the same training, to the last bit.
            every = tuple(wire for wire, _ in self._wires(policy).values())
            if every not in known:
                known[every] = self._after(begin, policy, seed, study)
            return known[every]

        found: dict[str, Any] = {"fp32": after(WirePolicy("fp32"))}
        for uniform, choice in WIRES.items():
            budget = sum(nbytes(uniform, layer.numbers) for layer in study.layers)
            policies = {"uniform": (uniform,), "plan": choice}
            found[uniform] = {
                how: after(wires(study, budget, names)) for how, names in policies.items()
            }
        return found

    def _after(self, begin: Any, policy: Any, seed: int, study: Any) -> dict[str, Any]:
        self._model.set_weights(begin)
        before = self._sent()
        self._fit(policy, seed, self._task.epochs)
        names = {one for row in self._strategy.explain() for one in row.collectives}
        # A bucket of this policy may have the name of one of the policy before.
        sent = sum(size - before[name] for name, size in self._sent().items() if name in names)
        counted = sent / int(self._model.optimizer.iterations)
        wires, planned = self._plan(policy, study)
        return {
            "wires": wires, "planned": planned, "counted": counted,
            "loss": self._loss(self._train), "test": self._loss(self._test),
        }  # fmt: skip

    def _sent(self) -> Counter[Any]:
        """Return the bytes that this worker has sent until now, by the collective's name."""
        found: Counter[Any] = Counter()
        for bucket, total in self._strategy.reducer.team.communicators[0].totals().items():
            found[bucket.untraced] += total.sent
        return found

    def _plan(self, policy: Any, study: Any) -> tuple[list[str], int]:
        """Return the wires of the studied layers, and the bytes of all gradients."""
        from tfscale.collectives.wires import nbytes

        chosen = self._wires(policy)
        planned = sum(nbytes(wire, size) for wire, size in chosen.values())
        studied = [
            wire
            for path, (wire, _) in chosen.items()
            if any(path.startswith(f"{layer.path}/") and "kernel" in path for layer in study.layers)
        ]
        return studied, planned

    def _wires(self, policy: Any) -> dict[str, tuple[str, int]]:
        """Return the wire of each gradient, and its number of elements."""
        from tfscale.compression import Gradient

        chosen = {}
        for v in self._model.trainable_variables:
            gradient = Gradient(v.path, tuple(v.shape), "float32")
            chosen[v.path] = policy.method_of(gradient).name, gradient.elements
        return chosen

    def _loss(self, data: Any) -> float:
        return float(self._model.evaluate(*data, batch_size=_ROWS, verbose=0))

    def _fit(self, policy: Any, seed: int, epochs: int) -> None:
        """Train with a policy, from fresh states of the optimizer and of residuals."""
        import keras

        from tfscale.exchange.slots import Slots

        optimizer, (x, y) = self._model.optimizer, self._train
        for variable, value in zip(optimizer.variables, self._begin, strict=True):
            variable.assign(value)
        Slots.of(optimizer, self._strategy).load_own_variables({})
        self._strategy.reducer.change_policy(policy)
        self._model.make_train_function(force=True)  # a step traced before has the old wires
        steps = epochs * -(-len(x) // _BATCH)
        # The step is traced anew anyway, so the optimizer may get another schedule.
        optimizer.learning_rate = keras.optimizers.schedules.CosineDecay(self._task.rate, steps)
        keras.utils.set_random_seed(seed)
        self._model.fit(x, y, batch_size=_BATCH, epochs=epochs, verbose=0)


def main() -> None:
    """Do all trainings of a task."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    import tfscale

    file, task, seeds = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    trainer = Trainer(TASKS[task])
    kept = Kept(file if tfscale.rank() == 0 else None)
    for seed in seeds:
        kept.of(key(task, seed), functools.partial(trainer.results, seed))


if __name__ == "__main__":
    main()
