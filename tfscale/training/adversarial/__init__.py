"""Adversarial samples: inputs that are changed slightly, so that a model is wrong about them."""

from tfscale.native import tensorflow_needed as _  # noqa: F401
from tfscale.training.adversarial.attacks import FGSM, PGD
from tfscale.training.adversarial.examples import examples

__all__ = ["FGSM", "PGD", "examples"]
