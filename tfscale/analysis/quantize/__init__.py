"""Few bits for the weights that bear it: sensitivities of layers, and plans of bits.

- ``numbers.py``: quantizers, as functions of arrays.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401

__all__: list[str] = []
