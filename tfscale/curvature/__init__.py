"""Second derivatives of a model's loss: matrices as operators, and estimators of their spectra."""

from tfscale import tensorflow_needed as _  # noqa: F401
from tfscale.curvature.of_model import NotFiniteError
from tfscale.curvature.operators import Fisher, GaussNewton, Hessian

__all__ = ["Fisher", "GaussNewton", "Hessian", "NotFiniteError"]
