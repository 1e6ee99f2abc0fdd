"""``keras_seam`` or ``keras2_seam``, for the Keras that is installed."""

import importlib

from tfscale.keras_objects import KERAS_2

keras_seam = importlib.import_module(
    f"tfscale.strategy.{'keras2_seam' if KERAS_2 else 'keras_seam'}"
)
