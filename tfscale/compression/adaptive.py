r"""The adaptive method: chosen during training for the fastest steps within an error bound.

In a step of P replicas, replica i has its gradient and its residual, :math:`M_i = G_i + E_i`. It
sends :math:`M_i` without the new residual :math:`E_i'`. The relative error of the step is

.. math:: \epsilon = \sqrt{\sum_i \lVert E_i' \rVert^2 \Big/ \sum_i \lVert M_i \rVert^2}

the share that arrives later. Error feedback does not shrink this error, but makes sure that the
rest arrives: while all steps stay below :math:`\epsilon`, the residual stays below :math:`2
\epsilon / (1 - \epsilon^2)` times a gradient. So a bound on the error bounds the residual.

``deciding.py`` decides, and ``adaptation.py`` runs the decisions.

Reference: Karimireddy et al.: Error feedback fixes SignSGD (ICML 2019), arXiv 1901.09847.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfscale.collectives.wires import LOSSLESS, WIRES
from tfscale.compression.adaptation import KNOWN, MOST, WIDTH, Adaptation, in_use
from tfscale.compression.gradient import Gradient
from tfscale.compression.low_rank import PowerSGD
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire
from tfscale.compression.sparse import TopK
from tfscale.compression.switching import Switching, method_of, methods_of, switched
from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Adaptive(Switching):
    """Keeps the fastest method whose error stays within the bound, measured on live steps.

    Each bucket of gradients begins exactly. Then the links are measured, the cost model prices the
    methods, and steps try those that should be faster. A method stays if steps are faster with it
    and its relative error is within the bound. As soon as that is no longer true, full precision
    returns. All replicas switch at the same step.

    Args:
        bound: the largest relative error of a step: see the module. 0.02 admits 16 and 8 bits, 0.2
            also 4 bits; the error of top-k and low rank is usually between 0.3 and 1.
        among: methods that keep what they do not send, or names of wires, which then do.

    Example:
        >>> strategy = tfscale.ScaleStrategy(method="adaptive")
    """

    bound: float = 0.1
    among: tuple[Method | str, ...] = ("bf16", "int8", "int4", PowerSGD(4), TopK(0.01))
    alone = True

    def __post_init__(self) -> None:
        what = "the relative error of a step"
        arguments.real(self.bound, "bound", above=0, most=1, what=what, example="0.1")
        all_in_a_graph = f"a list of 1 to {MOST} methods, such as ('int8', TopK(0.01))"
        among = arguments.items(self.among, "among", all_in_a_graph, _with_feedback, most=MOST)
        chosen = [method for method in among if not method.lossless]
        for method in chosen:
            if isinstance(method, Switching) or RESIDUAL not in method.state(_LARGE):
                raise ValueError(
                    f"{method!r} cannot be among the methods of Adaptive, which must keep their "
                    'rounding errors as "residual", so that Adaptive knows them. Pass '
                    "feedback=True to the method, or leave it out"
                )
        object.__setattr__(self, "among", tuple(dict.fromkeys(chosen)))

    @property
    def variants(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The exact method, and the candidates."""
        return (Wire(), *methods_of(self.among, "among"))

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The exact method, for gradients that no candidate suits."""
        return (Wire(),)

    @property
    def rows_wire(self) -> str:
        """The lossless wire: rows of tables are sent exactly."""
        return LOSSLESS

    def suited(self, gradient: Gradient) -> Method:
        """Return this method with the candidates that suit a gradient, or an exact wire."""
        among = tuple(each for each in self.variants[1:] if each.suited(gradient) == each)
        return dataclasses.replace(self, among=among) if among else Wire()

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """Return the state of all methods, and the measurements."""
        return {**super().state(gradient), KNOWN: Kept((WIDTH,), common=True, start=_unmeasured)}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """Sum by the method that is chosen on live steps.

        Eager steps measure nothing: replicas take turns there, and Python takes most of the time.
        """
        if tf.executing_eagerly():
            return switched(load, in_use(load, self), self)
        adaptation: Adaptation = load.shared(Adaptation)
        return adaptation.sums(load, self, self.bound)

    def __str__(self) -> str:
        return f"adaptive, with an error of at most {self.bound:g}"


def _with_feedback(given: Method | str, name: str) -> Method:
    if isinstance(given, str) and given in WIRES:
        return Wire(given, feedback=True)
    return method_of(given, name)


_LARGE = Gradient("kernel", (1 << 12, 1 << 12), "float32")


def _unmeasured(shape: tuple[int, ...]) -> np.ndarray:
    known = np.full(shape, np.nan, np.float32)
    known[0] = 0
    return known
