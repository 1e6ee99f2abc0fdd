"""The Hessian of a model's loss, and approximations of it without negative eigenvalues."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfscale.analysis.curvature import targets
from tfscale.analysis.curvature.derivatives import dense
from tfscale.analysis.curvature.objective import Parts
from tfscale.analysis.curvature.of_model import OfModel
from tfscale.support import arguments

Vector = list[Any]  # a tensor for each variable, or each output; None stands for zeros


class Hessian(OfModel):
    r"""The Hessian of a model's loss, as a matrix that is never formed.

    For the loss :math:`L(w)` on all data, with the gradient :math:`g`, a product is
    :math:`H v = \partial (g^T v) / \partial w`, for a constant :math:`v`: each batch's gradient is
    differentiated once more. That costs two to three times the loss and its gradient.

    - **The loss** is the one that ``fit`` minimizes: the mean over all rows of the data, with
      sample weights, masks and loss weights as Keras has them, whatever the batches; with
      regularizers and ``add_loss``. A ``compute_loss`` of the model's own class, or a function
      given as ``loss``, is averaged over batches by their rows.
    - **Layers** behave as in ``evaluate``: no dropout, and batch normalization uses its moving
      statistics. With ``training=True`` they behave as in ``fit``: batch normalization uses a
      batch's statistics (so the matrix depends on the batches), and dropout uses the same masks in
      each pass. No variable of the model changes either way.
    - **Replicas.** If the model was made in the scope of a strategy, its replicas share each batch,
      and the matrix equals that of one device. All workers must make the same calls.
    - **Data** are read once for each product, batch by batch, and must be the same each time.
      Sums over batches are in float64.

    Args:
        model: a compiled model.
        x: inputs; or a ``tf.data.Dataset`` or ``keras.utils.PyDataset`` of all, in batches.
        y: targets.
        sample_weight: weight of each row.
        batch_size: rows of a global batch, if data are arrays; 32 by default, as in Keras.
        steps: how many batches to read; all by default.
        variables: the trainable variables that the matrix is over: regular expressions, searched in
            their paths, or variables. All others stay as they are.
        loss: replaces the compiled loss: a loss of Keras, or its name; or a function of the model
            and a batch, as ``fit`` gives it to ``train_step``, that returns the losses of the
            batch's rows, or their mean.
        regularizers: whether the layers' regularizers are part of the loss.
        add_loss: whether losses that layers add by ``add_loss`` are part of the loss.
        training: whether layers behave as in ``fit``.
        jit_compile: whether XLA compiles the product, for one device.
        memory: largest size of Lanczos's basis, in bytes, or such as "2GB".
        progress: whether to show the progress; by default if stderr is a terminal.

    Example:
        >>> import keras, numpy as np
        >>> from tfscale import curvature
        >>> model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
        >>> model.compile(loss="mse")
        >>> h = curvature.Hessian(model, np.array([[1.0], [2.0]]), np.zeros([2, 1]))
        >>> print(h @ np.ones(1))
        [5.]

    Reference: Pearlmutter, Fast Exact Multiplication by the Hessian, Neural Computation 6, 1994.
    """

    def _products_of(self, parts: Parts, values: Vector, vectors: list[Vector]) -> list[Vector]:
        gradients = self.gradients(parts.loss, values)
        return [self.again(gradients, values, vector) for vector in vectors]


class GaussNewton(OfModel):
    r"""The generalized Gauss-Newton matrix: the Hessian without the curvature of the model itself.

    .. math:: G = J^T H_f J

    with the Jacobian :math:`J` of the model's outputs :math:`f` by the variables, and the Hessian
    :math:`H_f` of the loss by the outputs. If the loss is convex in the outputs, no eigenvalue is
    negative. Near a minimum with small residuals it is close to the Hessian. Regularizers,
    ``add_loss`` and other terms that do not depend on the outputs contribute their own Hessian. For
    softmax outputs the loss is convex in the logits: let the model return the logits, with a loss
    ``from_logits=True``.

    Args:
        model: as for ``Hessian``, like all other arguments.

    Reference: Schraudolph, Fast Curvature Matrix-Vector Products for Second-Order Gradient Descent,
    Neural Computation 14, 2002.
    """

    def _products_of(self, parts: Parts, values: Vector, vectors: list[Vector]) -> list[Vector]:
        outputs = parts.outputs
        if not outputs:
            raise ValueError(
                "curvature.GaussNewton differentiates a loss by the model's outputs, and a loss "
                "that is a function of the model and a batch hides them: use Hessian"
            )
        slopes = _zeros_for_none(tf.gradients(parts.loss, outputs), outputs)
        others = tf.gradients(parts.loss, values, stop_gradients=outputs)
        return [
            _sums(
                self._through(outputs, slopes, values, v),
                self._past(outputs, others, values, v),
            )
            for v in vectors
        ]

    def _through(self, outputs: Vector, slopes: Vector, values: Vector, vector: Vector) -> Vector:
        bent = self.again(slopes, outputs, self.forward(outputs, values, vector))
        return list(tf.gradients(outputs, values, _zeros_for_none(bent, outputs)))

    def _past(self, outputs: Vector, slopes: Vector, values: Vector, vector: Vector) -> Vector:
        """Multiply by the Hessian of the terms that do not depend on the outputs: penalties."""
        given = [(dense(g, v), w) for g, v, w in zip(slopes, values, vector) if g is not None]
        if not given:
            return [None] * len(values)
        gradients, weights = zip(*given, strict=True)
        return self.again(gradients, values, weights, constants=outputs)


class Fisher(OfModel):
    r"""The Fisher information matrix: a mean of products of gradients.

    .. math:: F = \sum_i c_i\, g_i g_i^T

    with the gradient :math:`g_i` of the loss of element :math:`i` (a row; in sequences, a step of a
    row), and the weight :math:`c_i` of this element in the loss: 1 over their number, or the weight
    that sample weights and masks give. Regularizers and ``add_loss`` do not count. With several
    outputs, each output is a separate observation.

    - ``kind="empirical"``: with the targets of the data.
    - ``kind="sampled"``: with targets that are drawn from the model's predictions: classes for
      cross-entropies; for the squared error, normally distributed numbers with the variance for
      which that error is the negative log-likelihood. The mean over draws is the Gauss-Newton
      matrix, if the model returns logits or, for the squared error, numbers. A
      ``BinaryCrossentropy`` averages over d outputs: the mean over draws is then 1/d of that
      matrix. A row draws the same target each time, wherever it is; equal rows draw the same.

    No eigenvalue is negative.

    Args:
        model: as for ``Hessian``, like all arguments that are not listed here.
        kind: ``"empirical"`` or ``"sampled"``.
        seed: seed of the drawn targets.

    Reference: Kunstner, Balles, Hennig, Limitations of the Empirical Fisher Approximation for
    Natural Gradient Descent, https://arxiv.org/abs/1905.12558.
    """

    def __init__(
        self, model: Any, x: Any, y: Any = None, sample_weight: Any = None, *,
        kind: str = "empirical", seed: int = 0, **others: Any,
    ) -> None:  # fmt: skip
        arguments.choice(kind, "kind", ("empirical", "sampled"))
        seed = arguments.whole(seed, "seed", 0)
        super().__init__(model, x, y, sample_weight, **others)
        self._given |= {"kind": kind, "seed": seed}
        self.draws, self._seed = kind == "sampled", seed

    def _draw(self, data: Any) -> Any:
        return targets.drawn(data, self._seed) if self.draws else None

    def _products_of(self, parts: Parts, values: Vector, vectors: list[Vector]) -> list[Vector]:
        elements = parts.elements
        if not elements or any(one is None or one.shape.rank == 0 for one in elements):
            raise ValueError(
                "curvature.Fisher needs the loss of each row, which compiled losses of Keras give. "
                f"{self.model.name!r} computes its loss by itself, or a loss of it returns one "
                "number for all rows (as 'mse' does for outputs without a last axis). Give loss=, "
                "a function of the model and a batch that returns the losses of the batch's rows; "
                "or use Hessian"
            )
        weights = _zeros_for_none(tf.gradients(parts.loss, elements), elements)

        def product(vector: Vector) -> Vector:
            slopes = self.forward(elements, values, vector)
            weighted = [c * s for c, s in zip(weights, slopes, strict=True)]
            return list(tf.gradients(elements, values, weighted))

        return [product(vector) for vector in vectors]


def _zeros_for_none(found: Vector, like: Vector) -> Vector:
    return [tf.zeros_like(y) if x is None else x for x, y in zip(found, like, strict=True)]


def _sums(some: Vector, others: Vector) -> Vector:
    return [
        a if b is None else dense(b, b) if a is None else dense(a, b) + b
        for a, b in zip(some, others, strict=True)
    ]
