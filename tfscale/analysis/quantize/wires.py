r"""Wires of gradients by sensitivity: where rounding a gradient costs most, more bits travel.

A step with the rate :math:`\eta` and a gradient whose rounding error is e raises the loss by
:math:`\eta^2 e^T H e / 2` more. For layer l that is about :math:`\bar h_l \|e_l\|^2`, with the mean
eigenvalue :math:`\bar h_l`. A wire w loses the share :math:`r_w` of a gradient's squared norm, and
near a minimum the squared norm of a batch's gradient is about :math:`\bar h_l n_l`, because the
Fisher information is near the Hessian. So the cost of a wire is :math:`\bar h_l^2 n_l r_w`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from tfscale.analysis.quantize.kernels import ATTRIBUTES
from tfscale.analysis.quantize.program import Program, Resource
from tfscale.analysis.quantize.study import LayerStudy, Study
from tfscale.collectives.wires import FORMATS, checked, nbytes
from tfscale.compression import WirePolicy
from tfscale.support import arguments
from tfscale.support.sizes import amount, in_words

WIRES = ("fp32", "bf16", "int8", "int4")
# Mean square of the largest of 256 normally distributed numbers of variance 1, about.
_LARGEST_OF_BLOCK = 9.0
BUDGET = "a number of bytes for a step's gradients, or a share of those in fp32: '25%'"


def wires(study: Study, budget: float | str = "25%", wires: Iterable[str] = WIRES) -> WirePolicy:
    r"""Choose a wire for the gradient of each layer: the least harm within a budget of bytes.

    The choice minimizes :math:`\sum_l \bar h_l^2 n_l r_{w_l}`, with a layer's mean eigenvalue
    :math:`\bar h_l`, its :math:`n_l` weights, and the share :math:`r_w` of a gradient's squared
    norm that wire w loses. Biases and other gradients that the study does not know stay in fp32.

    Args:
        study: sensitivities by ``"trace"`` or ``"fisher"``, from ``quantize.sensitivity``.
        budget: bytes of the studied layers' gradients, encoded once, or a share of their bytes in
            fp32, such as ``"25%"``.
        wires: names of the wires to choose from.

    Example:
        >>> _ = model.fit(x, y, verbose=0)
        >>> study = tfscale.quantize.sensitivity(model, x, y, bits=(4, 8), samples=8)
        >>> policy = tfscale.quantize.wires(study, budget="40%", wires=("fp32", "int8"))
        >>> strategy = tfscale.ScaleStrategy(wire=policy, devices=["CPU:0"])
    """
    arguments.instance(study, "study", Study, "a study of quantize.sensitivity")
    if study.by not in ("trace", "fisher"):
        raise arguments.wrong(study.by, "study.by", "'trace' or 'fisher', for quantize.wires")
    names = checked_names(wires)
    whole = sum(nbytes("fp32", layer.numbers) for layer in study.layers)
    limit = amount(budget, "budget", BUDGET, whole)
    # The program chooses widths, which are numbers: a wire's number is its place in the list.
    numbered = dict(enumerate(dict.fromkeys(names)))
    costs = [{i: _harm(layer, name) for i, name in numbered.items()} for layer in study.layers]
    uses = [
        {i: float(nbytes(name, layer.numbers)) for i, name in numbered.items()}
        for layer in study.layers
    ]
    found = Program(costs, [Resource("budget", uses, limit, in_words)]).solve()
    kernels = "|".join(ATTRIBUTES)
    rules = {
        f"^{re.escape(layer.path)}/({kernels})$": numbered[i]
        for layer, i in zip(study.layers, found.bits, strict=True)
    }
    return WirePolicy("fp32", rules)


def checked_names(wires: Any) -> tuple[str, ...]:
    """Return names of wires, or raise."""
    return tuple(
        arguments.items(wires, "wires", "a list of wires, such as ('int8', 'int4')", checked)
    )


def _harm(layer: LayerStudy, wire: str) -> float:
    found = layer.curvature
    mean = max(found.value, 0.0 if math.isnan(found.error) else found.error, 0.0)
    return mean**2 * layer.numbers * lost_share(wire)


def lost_share(wire: str) -> float:
    """Return the share of a gradient's squared norm that a wire loses, about.

    The bound of a number's error is half a step. An error that is uniform within it has a third of
    its square.

    Example:
        >>> lost_share("fp32"), round(lost_share("int4"), 4)
        (0.0, 0.0153)
    """
    error: Any = FORMATS[wire].nearest
    share = (1 / error.of_number**2 + _LARGEST_OF_BLOCK / error.of_block**2) / 3
    return float(min(1.0, share))
