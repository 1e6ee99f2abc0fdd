"""Few bits for the weights that bear it: sensitivities of layers, and plans of bits.

- ``numbers.py``: quantizers, as functions of arrays.
- ``apply.py``: a copy of a model that computes with few bits; ``folding.py``: batch norm leaves it.
- ``layers.py``: its layers; ``quantizer.py``: their scales; ``grid.py``: what travels between them.
- ``dyadic.py``: arithmetic that integers and real numbers do alike.
- ``integers.py``, ``windows.py``: the same copy as a program of whole numbers, in NumPy.
- ``masks.py``: pruning while a model trains; ``shrink.py``: removal of channels that are zero.
- ``graph.py``: the graph of a model's layers; ``channels.py``: which channels leave together.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401, I001

from tfscale.analysis.quantize.apply import apply
from tfscale.analysis.quantize.integers import Integers, integers
from tfscale.analysis.quantize.masks import Prune
from tfscale.analysis.quantize.shrink import shrink

__all__ = ["Integers", "Prune", "apply", "integers", "shrink"]
