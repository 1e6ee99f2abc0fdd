"""One worker that trains the cases of the table and says what came of each."""

from __future__ import annotations

import hashlib

import keras
import numpy as np

from tests.strategy.cases import BY_NAME
from tests.strategy.turns import take
from tfscale.bridge.objects import optimizers_of
from tfscale.strategy.placed import Placed


def weights_of(model):
    """Return weights by path and by number, since paths may be equal."""
    return {f"{i} {v.path}": v for i, v in enumerate(model.weights)}


def state_of(model):
    """Return state by name: the path says whether the optimizer was built within a step.

    A model that was compiled without one has an optimizer of Keras's choice, which takes no step.
    """
    used = [one for one in optimizers_of(model) if one.iterations.numpy() > 0]
    variables = [v for optimizer in used for v in optimizer.variables]
    return {f"{i} {v.name.split('/')[-1]}": v for i, v in enumerate(variables)}


def digests(strategy, variable):
    """One for each replica of this worker; none for parts, which differ."""
    if isinstance(variable.value, Placed):
        return []
    replicas = strategy.experimental_local_results(variable.value)
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest()[:12] for each in replicas]


def numbers(seen):
    return {name: np.asarray(value, np.float64).tolist() for name, value in seen.items()}


def record(strategy, case):
    """Return the results of one case, a way to build a model and to train it."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = case.build()
    return results(strategy, model, case.train(model))


def results(strategy, model, seen):
    """Return what a trained model holds, what was seen of it, and the digests of all copies."""
    weights, kept = weights_of(model), state_of(model)
    return {
        "weights": numbers({name: v.numpy() for name, v in weights.items()}),
        "seen": numbers(seen | {name: v.numpy() for name, v in kept.items()}),
        "digests": {name: digests(strategy, v) for name, v in (weights | kept).items()},
    }


if __name__ == "__main__":
    take(lambda strategy, name: record(strategy, BY_NAME[name]))
