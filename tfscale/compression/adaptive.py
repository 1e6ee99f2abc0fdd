r"""The method that is chosen while a model trains: what makes its steps faster, within a bound.

A step of P replicas sends of each replica's gradient and what it has kept,
:math:`M_i = G_i + E_i`, all but the new rest :math:`E_i'`. Its relative error is

.. math:: \epsilon = \sqrt{\sum_i \lVert E_i' \rVert^2 \Big/ \sum_i \lVert M_i \rVert^2}

the part of what was to be sent that comes later. Error feedback does not make it smaller, but sees
that it comes: while all steps stay below :math:`\epsilon`, what is kept stays below
:math:`2 \epsilon / (1 - \epsilon^2)` times a gradient, so that a bound on the one bounds the other.

``tfscale/exchange/deciding.py`` decides, and ``adaptation.py`` there runs what was decided.

Reference: Karimireddy et al.: Error feedback fixes SignSGD (ICML 2019), arXiv 1901.09847.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfscale import arguments
from tfscale.compression.gradient import Gradient
from tfscale.compression.low_rank import PowerSGD
from tfscale.compression.method import RESIDUAL, Kept, Load, Method, Wire
from tfscale.compression.sparse import TopK
from tfscale.compression.switching import Switching, method_of, methods_of
from tfscale.wires import LOSSLESS, WIRES

KNOWN = "adaptive"  # what is kept of a gradient: see Known

MOST = 8  # candidates: all of them are in the graph of each bucket


@dataclasses.dataclass(frozen=True)
class Adaptive(Switching):
    """Of several methods the one by which a step is fastest, chosen and checked on live steps.

    Each bucket of gradients begins exactly. Then the links are measured, methods are priced by
    the cost model, and those that should be faster are tried. One stays if steps are faster with
    it and its relative error is within the bound, and full precision is back as soon as that is
    no longer so. All replicas change at the same step.

    Args:
        bound: the largest relative error of what a step sends: see the module. 0.02 admits 16 and
            8 bits, 0.2 also 4 bits; that of top-k and low rank is usually between 0.3 and 1.
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
                    f"{method!r} cannot be among the methods of Adaptive: what it loses is not "
                    'known, as it keeps no "residual". Turn its feedback on'
                )
        object.__setattr__(self, "among", tuple(dict.fromkeys(chosen)))

    @property
    def variants(self) -> tuple[Method, ...]:  # type: ignore[override]
        """The exact method, and those among which it chooses."""
        return (Wire(), *methods_of(self.among, "among"))

    @property
    def others(self) -> tuple[Method, ...]:  # type: ignore[override]
        """What it leaves gradients to that none of its methods suits."""
        return (Wire(),)

    @property
    def rows_wire(self) -> str:
        """Rows of tables are sent exactly."""
        return LOSSLESS

    def suited(self, gradient: Gradient) -> Method:
        """The same among the methods that suit."""
        among = tuple(each for each in self.variants[1:] if each.suited(gradient) == each)
        return dataclasses.replace(self, among=among) if among else Wire()

    def state(self, gradient: Gradient) -> Mapping[str, Kept]:
        """That of all methods, and what is known of them."""
        return {**super().state(gradient), KNOWN: Kept((WIDTH,), common=True, start=_nothing)}

    def sums(self, load: Load) -> list[tf.Tensor]:
        """See the module."""
        return load.adapted(self)

    def __str__(self) -> str:
        return f"adaptive, with an error of at most {self.bound:g}"


def _with_feedback(given: Method | str, name: str) -> Method:
    if isinstance(given, str) and given in WIRES:
        return Wire(given, feedback=True)
    return method_of(given, name)


_LARGE = Gradient("kernel", (1 << 12, 1 << 12), "float32")

# What is kept: the number of the method in use; seconds that each computes; the error of each.
WIDTH = 1 + 2 * (MOST + 1)


def _nothing(shape: tuple[int, ...]) -> np.ndarray:
    known = np.full(shape, np.nan, np.float32)
    known[0] = 0
    return known
