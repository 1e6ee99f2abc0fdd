"""Few bits for the weights that bear it: sensitivities of layers, and plans of bits.

- ``sensitivity.py``: measures how much the loss rises by layer and width; ``study.py``: the result.
- ``plan.py``: a width for each layer; ``front.py``: plans from the smallest to the largest size.
- ``program.py``: the choice of widths as an integer program.
- ``wires.py``: wires of gradients by sensitivity.
- ``kernels.py``, ``sums.py``: which weights can have few bits; which layers feed one sum.
- ``numbers.py``: quantizers, as functions of arrays.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401

# isort: split
from tfscale.analysis.quantize.front import Front, front
from tfscale.analysis.quantize.plan import LayerPlan, Plan, plan
from tfscale.analysis.quantize.program import InfeasibleError
from tfscale.analysis.quantize.sensitivity import sensitivity
from tfscale.analysis.quantize.study import Inputs, LayerStudy, Study
from tfscale.analysis.quantize.wires import wires

__all__ = [
    "Front", "InfeasibleError", "Inputs", "LayerPlan", "LayerStudy", "Plan", "Study", "front",
    "plan", "sensitivity", "wires",
]  # fmt: skip
