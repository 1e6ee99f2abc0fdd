"""The optimizers that ``test_every.py`` runs. To add one, add a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras

from tfscale.optimizers import LAMB, LARS, AdaHessian


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        name: for the tests' names.
        make: the class, or a partial of it.
        rate: at which it learns the problems; it falls to zero.
        other: for each of its own arguments a value that is not the default.
        calm: what keeps it far from where rounding is amplified.
    """

    name: str
    make: Callable[..., keras.optimizers.Optimizer]
    rate: float
    other: Mapping[str, Any] = field(default_factory=dict)
    calm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[keras.optimizers.Optimizer]:
        return getattr(self.make, "func", self.make)


LISTS = {"exclude_from_weight_decay": ["^a/", "bias$"], "exclude_from_adaptation": ["gamma"]}
OF_LARS = {
    "momentum": 0.8,
    "nesterov": True,
    "weight_decay": 0.1,
    "trust_coefficient": 0.01,
    "epsilon": 0.001,
    "form": "popular",
    "trust_clip": True,
    "fused": False,
    **LISTS,
}
OF_LAMB = {
    "beta_1": 0.8,
    "beta_2": 0.9,
    "epsilon": 0.001,
    "weight_decay": 0.1,
    "bias_correction": False,
    "trust_bounds": [0.5, 2.0],
    "fused": True,
    **LISTS,
}

OF_ADAHESSIAN = {
    "beta_1": 0.8,
    "beta_2": 0.9,
    "epsilon": 0.001,
    "weight_decay": 0.1,
    "hessian_power": 0.5,
    "samples": 2,
    "update_each": 3,
    "averaging": {"kernel": "inputs"},
    "seed": 7,
    "exclude_from_weight_decay": ["^a/", "bias$"],
}

EVERY = [
    Entry("lars", partial(LARS, trust_coefficient=0.1), 1.0, OF_LARS),
    Entry("lamb", LAMB, 0.1, OF_LAMB),
    # It divides by curvatures, some of which are nearly zero.
    Entry("adahessian", AdaHessian, 0.15, OF_ADAHESSIAN, calm={"epsilon": 0.1}),
]
