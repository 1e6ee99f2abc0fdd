"""The seam of the Keras that is installed."""

import importlib

import keras

KERAS_2 = keras.__version__.startswith("2.")

keras_seam = importlib.import_module(
    f"tfscale.strategy.{'keras2_seam' if KERAS_2 else 'keras_seam'}"
)
