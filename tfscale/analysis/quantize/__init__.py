"""Few bits for the weights that bear it: sensitivities, plans, training, integers and pruning.

- ``sensitivity.py``: measures how much the loss rises by layer and width; ``study.py``: the result.
- ``plan.py``: a width for each layer; ``front.py``: plans from the smallest to the largest size.
- ``program.py``: the choice of widths as an integer program.
- ``search.py``: widths, kernels and bits of blocks, chosen by the same program.
- ``wires.py``: wires of gradients by sensitivity; ``refresh.py``: chooses them again.
- ``kernels.py``, ``sums.py``: which weights can have few bits; which layers feed one sum.
- ``numbers.py``: quantizers, as functions of arrays.
- ``apply.py``: a copy of a model that computes with few bits; ``folding.py``: batch norm leaves it.
- ``of_keras.py``: Keras's own ``model.quantize``, by a plan.
- ``litert.py``: files of LiteRT; ``unquantized.py``: Keras's layers again, with rounded weights.
- ``layers.py``: its layers; ``quantizer.py``: their scales; ``grid.py``: what travels between them.
- ``dyadic.py``: arithmetic that integers and real numbers do alike.
- ``integers.py``, ``windows.py``: the same copy as a program of whole numbers, in NumPy.
- ``masks.py``: pruning while a model trains; ``shrink.py``: removal of channels that are zero.
- ``graph.py``: the graph of a model's layers; ``channels.py``: which channels leave together.
"""

from tfscale.native import tensorflow_needed as _  # noqa: F401

# isort: split
from tfscale.analysis.quantize.apply import apply
from tfscale.analysis.quantize.front import Front, front
from tfscale.analysis.quantize.integers import Integers, integers
from tfscale.analysis.quantize.litert import Exported, ExportError, NotExportableError
from tfscale.analysis.quantize.masks import Prune
from tfscale.analysis.quantize.plan import LayerPlan, Plan, plan
from tfscale.analysis.quantize.program import InfeasibleError
from tfscale.analysis.quantize.refresh import RefreshWires
from tfscale.analysis.quantize.search import Net, Search, search
from tfscale.analysis.quantize.sensitivity import sensitivity
from tfscale.analysis.quantize.shrink import shrink
from tfscale.analysis.quantize.study import Inputs, LayerStudy, Study
from tfscale.analysis.quantize.wires import wires

__all__ = [
    "ExportError", "Exported", "Front", "InfeasibleError", "Inputs", "Integers", "LayerPlan",
    "LayerStudy", "Net", "NotExportableError", "Plan", "Prune", "RefreshWires", "Search", "Study",
    "apply", "front", "integers", "plan", "search", "sensitivity", "shrink", "wires",
]  # fmt: skip
