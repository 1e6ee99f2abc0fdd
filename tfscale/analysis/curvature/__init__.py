"""Second derivatives of a model's loss: matrices as operators, and estimators of their spectra."""

from tfscale.native import tensorflow_needed as _  # noqa: F401

# isort: split
from tfscale.analysis.curvature.of_model import NotFiniteError
from tfscale.analysis.curvature.operators import Fisher, GaussNewton, Hessian

__all__ = ["Fisher", "GaussNewton", "Hessian", "NotFiniteError"]
