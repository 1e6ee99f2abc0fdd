"""Few bits for the weights that bear it: sensitivities of layers, and plans of bits.

- ``numbers.py``: quantizers, as functions of arrays.
- ``apply.py``: a copy of a model that computes with few bits; ``folding.py``: batch norm leaves it.
- ``layers.py``: its layers; ``quantizer.py``: their scales; ``grid.py``: what travels between them.
- ``dyadic.py``: arithmetic that integers and real numbers do alike.
- ``graph.py``: the graph of a model's layers.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401, I001

from tfscale.analysis.quantize.apply import apply

__all__ = ["apply"]
