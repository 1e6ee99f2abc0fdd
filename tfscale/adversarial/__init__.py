"""Adversarial samples: inputs that are changed slightly, so that a model is wrong about them."""

from tfscale import tensorflow_needed as _  # noqa: F401
from tfscale.adversarial.attacks import FGSM, PGD
from tfscale.adversarial.examples import examples

__all__ = ["FGSM", "PGD", "examples"]
