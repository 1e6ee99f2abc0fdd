"""Second derivatives of a model's loss: operators, and estimators of what is in them."""

from tfscale import tensorflow_needed as _  # noqa: F401
from tfscale.curvature.of_model import NotFiniteError
from tfscale.curvature.operators import Fisher, GaussNewton, Hessian

__all__ = ["Fisher", "GaussNewton", "Hessian", "NotFiniteError"]
