"""AdaHessian: Adam with the curvature instead of the squared gradient."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfscale.analysis.curvature.probes import signs
from tfscale.bridge import optimizers as bridge
from tfscale.bridge.calls import caller
from tfscale.bridge.objects import native
from tfscale.bridge.optimizers import ops
from tfscale.support import arguments
from tfscale.training.optimizers import curvature as hutchinson, rules
from tfscale.training.optimizers.averaging import Averaging, averaged, checked, rule_for
from tfscale.training.optimizers.base import (
    DECAY,
    Optimizer,
    Patterns,
    checked_share,
    warn_of_idle,
)
from tfscale.training.optimizers.paths import BIAS_AND_NORM
from tfscale.training.optimizers.recording import Now, OpenTape, follow


class _Both(NamedTuple):
    """A variable's gradient and its D, which replace the gradient.

    Under every strategy, TensorFlow sums both over replicas, and gives each ``update_step`` the
    sums.
    """

    gradient: Any
    curvature: Any


@keras.saving.register_keras_serializable(package="tfscale")
class AdaHessian(Optimizer):
    r"""Adam's rule with the Hessian's diagonal instead of the squared gradient (Yao et al.).

    For each variable :math:`w` with gradient :math:`g`, at step :math:`t` (from 1):

    .. math::
        D &= \frac{1}{s} \sum_{i=1}^{s} z_i \odot (H z_i), \qquad z_i \in \{-1, 1\}^n \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) g \\
        v &\leftarrow \beta_2 v + (1 - \beta_2) \bar D^2 \\
        w &\leftarrow w - \eta \left(
            \frac{m / (1 - \beta_1^t)}{(v / (1 - \beta_2^t))^{k/2} + \epsilon} + \lambda w \right)

    with the loss's Hessian :math:`H`, random signs :math:`z`, the learning rate :math:`\eta`,
    the decay :math:`\lambda` and the Hessian power :math:`k`. :math:`\bar D` is :math:`D` after
    spatial averaging.

    **D is unbiased** (Hutchinson). :math:`E[z_i z_j]` is 1 for :math:`i = j` and 0 otherwise, so
    :math:`E[z_i (Hz)_i] = \sum_j H_{ij} E[z_i z_j] = H_{ii}`. If :math:`H` is diagonal, D is exact
    for every :math:`z`. Its variance is :math:`\sum_{j \ne i} H_{ij}^2 / s`.

    **No Hessian is formed.** :math:`Hz` is the gradient of :math:`g^T z`, which costs about twice a
    forward and backward pass. AdaHessian works with plain ``compile`` and ``fit``: in a graph, the
    optimizer differentiates the gradients once more when it applies them. In your own eager loop,
    compute, differentiate and apply ``with optimizer.recording():``, as in the example.

    **update_each.** With ``update_each=n`` the steps 1, n+1, 2n+1, ... compute :math:`D`, which
    counts for all n steps: :math:`v \leftarrow \beta_2^n v + (1 - \beta_2^n) \bar D^2`. In other
    steps :math:`v` stays, and the second backward pass does not run.

    **Replicas.** The signs depend on the seed and the iteration, so all replicas draw the same
    signs. If the global loss is the sum of the replicas', :math:`H = \sum_r H_r`, then
    :math:`\sum_r z \odot (H_r z) = z \odot (\sum_r H_r z) = z \odot (Hz)`. So the sum of the
    replicas' :math:`D` equals the :math:`D` of the global batch with the same :math:`z`, number by
    number, and so does its expectation. Replicas that accumulate gradients average :math:`D` over
    the same window with the same :math:`z`, and by the same equation get the :math:`D` of the whole
    window.

    **Loss scaling.** :math:`D` is linear in the loss and is unscaled like the gradient.

    **Overflow.** If the square of a variable's :math:`D` is not finite everywhere, as may happen in
    float16, this :math:`D` is ignored: the corrected :math:`v` stays. A variable without any usable
    :math:`D` so far does not move.

    Args:
        learning_rate: :math:`\eta`, a float, a schedule, or a function without arguments.
        beta_1: decay rate of :math:`m`.
        beta_2: decay rate of :math:`v`.
        epsilon: a number that is added to the root, after the bias correction.
        weight_decay: :math:`\lambda`; None turns it off.
        hessian_power: :math:`k`, from 0 (momentum alone) to 1.
        samples: :math:`s`, number of :math:`z` that a step draws. Each costs one more backward
            pass.
        update_each: number of steps that share a :math:`D`.
        averaging: neighbours that share the mean of their :math:`D`: ``"window"`` (all axes but the
            last two: the window of a convolution's kernel), ``"inputs"`` (all axes but the last:
            one number for each output), ``"outputs"`` (the last axis: one number for each row, as
            in embeddings), a number (flat blocks of that length) or None. A dictionary maps regular
            expressions, searched in variables' paths, to these rules; the first match counts, and
            without a match ``"auto"``. A function of :math:`D` and its variable returns a mean that
            broadcasts to the variable's shape. ``"auto"`` is the window for kernels with four axes
            or more, and None for others.
        seed: seed of the signs; None means 0. All programs may use the same seed.
        exclude_from_weight_decay: regular expressions, searched in variables' paths; ``()``
            excludes no variable.
        base: arguments of every Keras optimizer: ``name``, ``clipnorm``, ``clipvalue``,
            ``global_clipnorm``, ``use_ema``, ``ema_momentum``, ``ema_overwrite_frequency``,
            ``loss_scale_factor``, ``gradient_accumulation_steps``. Clipping applies to gradients.

    Example:
        The first step of a sum of parabolas is Newton's:

        >>> import keras, tensorflow as tf, tfscale.optimizers
        >>> w = keras.Variable([3.0, 4.0], name="kernel")
        >>> optimizer = tfscale.optimizers.AdaHessian(learning_rate=1.0, epsilon=0.0)
        >>> with optimizer.recording():
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_sum([5.0, 70.0] * (w - [1.0, 2.0]) ** 2)
        ...     optimizer.apply(tape.gradient(loss, [w]), [w])
        >>> print(w.numpy().round(4))
        [1. 2.]

    Differences from others, cost and limits: docs/adahessian.md.

    Reference: Yao, Gholami, Shen, Mustafa, Keutzer, Mahoney, AdaHessian: An Adaptive Second Order
    Optimizer for Machine Learning, https://arxiv.org/abs/2006.00719.
    """

    def __init__(
        self,
        learning_rate: Any = 0.15,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-4,
        weight_decay: float | None = None,
        hessian_power: float = 1.0,
        samples: int = 1,
        update_each: int = 1,
        averaging: Averaging = "auto",
        seed: int | None = None,
        exclude_from_weight_decay: Patterns = BIAS_AND_NORM,
        **base: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, {DECAY: exclude_from_weight_decay}, **base)
        self.beta_1 = checked_share(beta_1, "beta_1")
        self.beta_2 = checked_share(beta_2, "beta_2")
        self.epsilon = arguments.real(epsilon, "epsilon", 0)
        self.hessian_power = arguments.real(hessian_power, "hessian_power", 0, 1)
        self.samples = arguments.whole(samples, "samples", 1)
        self.update_each = arguments.whole(update_each, "update_each", 1)
        self.averaging = checked(averaging)
        self.seed = arguments.optional(arguments.whole, seed, "seed", 0) or 0
        self._now = Now()
        self._scaler: Any = _no_scaler  # returns the optimizer that scales the loss, or None

    def build(self, variables: list[Any]) -> None:
        """Make the state, once the variables are known."""
        if self.built:
            return
        super().build(variables)
        self._averages = [rule_for(self.averaging, v) for v in variables]
        if isinstance(self.averaging, dict):
            warn_of_idle("averaging", self.averaging, variables)
        self._momentums = self.add_state("momentum")
        self._velocities = self.add_state("velocity")
        if self.gradient_accumulation_steps:
            self._accumulated_curvature = self.add_state("curvature_accumulator")

    # ------------------------------------------------------------- curvature

    @tf.autograph.experimental.do_not_convert
    def curvature(
        self, gradients: Sequence[Any], variables: Sequence[Any], unscaled: bool = False
    ) -> list[Any]:
        """Return this replica's D; the caller passes its sum over replicas to ``given``.

        Call this in every step, just before ``apply`` and before gradients are summed or clipped. D
        is that of the scaled loss, unless the gradients have been divided by the scale. In steps
        that need no D (``update_each``), the result is zeros, and ``apply`` ignores it.

        Args:
            gradients: this replica's gradients, dense, ``IndexedSlices`` or None.
            variables: the variables of the gradients.
            unscaled: whether the gradients have been divided by the loss's scale.

        Returns:
            For each variable a dense tensor of its shape, or None if the gradient is None.
        """
        scale = self._loss_scale()
        if scale is None:
            return self._measured(gradients, variables, 1.0)
        root = _power_of_2_near_root(scale)
        return self._measured(gradients, variables, root if unscaled else 1 / root)

    @contextlib.contextmanager
    def given(self, curvature: Sequence[Any]) -> Iterator[None]:
        """Let this thread's ``apply`` use the given D within this context.

        Args:
            curvature: for each variable that ``apply`` gets, the result of ``curvature``, summed
                over replicas and divided by the loss's scale.
        """
        before, self._now.given = self._now.given, list(curvature)
        try:
            yield
        finally:
            self._now.given = before

    def give(self, curvature: Sequence[Any]) -> None:
        """Let this thread's next ``apply`` use the given D: for callers that cannot use ``given``.

        Args:
            curvature: as for ``given``.
        """
        self._now.next = list(curvature)

    @tf.autograph.experimental.do_not_convert
    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record an eager step: compute, differentiate and apply within this context.

        In a graph this does nothing, and is not needed.
        """
        if not tf.executing_eagerly() or not self.curvature_is_due():
            yield
            return
        before, self._now.open_tape = self._now.open_tape, OpenTape()
        try:
            yield
        finally:
            self._now.open_tape.close()
            self._now.open_tape = before

    def follow(self, model: keras.Model) -> None:
        """Make a model record its eager computation; ``compile`` does so with a new model.

        Call this before an eager ``fit`` if the model was compiled with another optimizer before,
        or if you put this optimizer into a ``LossScaleOptimizer`` yourself.

        Args:
            model: a model that was compiled with this optimizer.
            model: a model that was compiled with this optimizer.
        """
        follow(model)

    def curvature_is_due(self) -> tf.Tensor:
        """Return whether this step, or this window of accumulated steps, computes D."""
        return tf.equal(tf.convert_to_tensor(self.iterations) % self.update_each, 0)

    def _when_due(self, do: Callable[[], Any], do_else: Callable[[], Any]) -> Any:
        return do() if self.update_each == 1 else tf.cond(self.curvature_is_due(), do, do_else)

    def _measured(self, gradients: Sequence[Any], variables: Sequence[Any], size: Any) -> list[Any]:
        """Return D if it is due, and zeros otherwise."""
        places = [
            i
            for i, (g, v) in enumerate(zip(gradients, variables, strict=True))
            if g is not None and not self._overwrite_variable_with_gradient(v)
        ]
        ys, xs = [gradients[i] for i in places], [variables[i] for i in places]
        diagonal = functools.partial(self._diagonal, ys, xs, size)
        terms = self._when_due(diagonal, lambda: [tf.zeros(v.shape, v.dtype) for v in xs])
        found: list[Any] = [None] * len(gradients)
        for place, term in zip(places, terms, strict=True):
            found[place] = term
        return found

    def _diagonal(self, gradients: list[Any], variables: list[Any], size: Any) -> list[tf.Tensor]:
        places = [self._get_variable_index(v) for v in variables]
        step = tf.convert_to_tensor(self.iterations)

        def draw(i: int, sample: int) -> tf.Tensor:
            name = (self.seed, places[i], sample)
            return signs(variables[i].shape, gradients[i].dtype, name, step)

        return hutchinson.diagonal(
            self._differentiate(variables), gradients, variables, draw, self.samples, size
        )

    def _differentiate(self, variables: list[Any]) -> hutchinson.Differentiate:
        if not tf.executing_eagerly():
            return hutchinson.in_graph
        if self._now.open_tape is None:
            raise RuntimeError(_NOT_RECORDED)
        self._now.open_tape.close()
        return functools.partial(hutchinson.on_tape, self._now.open_tape.tape)

    def _loss_scale(self) -> Any:
        """Return the factor of the loss, or None."""
        scaler = self._scaler()
        if scaler is not None:
            return bridge.scale_of(scaler)
        return self.loss_scale_factor

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_scaler" in vars(self) and bridge.is_told_to_wrappee(name, value):
            scaler = caller(bridge.LossScaleOptimizer)
            self._scaler = _unknown_scaler if scaler is None else weakref.ref(scaler)

    # ---------------------------------------------------------------- update

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables, as in any Keras optimizer."""
        grads = list(grads)
        known = trainable_variables is None
        variables = self._trainable_variables if known else list(trainable_variables)
        if not self.built and variables:
            with bridge.building(self.name):
                self.build(variables)
        if len(grads) == len(variables):  # if not, Keras says so
            self._now.curvature = self._curvature_for(grads, variables)
        try:
            super().apply(grads, None if known else variables)
        finally:
            self._now.curvature = None

    def _curvature_for(self, grads: list[Any], variables: list[Any]) -> dict[int, Any]:
        """Return D of the unscaled loss, by the places of the variables."""
        found = self._now.given
        if found is None:
            found, self._now.next = self._now.next, None
        if found is None:
            found = self._own_curvature(grads, variables)
        terms = {
            self._get_variable_index(v): tf.zeros(v.shape, v.dtype) if d is None else d
            for g, v, d in zip(grads, variables, found, strict=True)
            if g is not None
        }
        if self.gradient_accumulation_steps:
            for place, d in terms.items():
                total = self._accumulated_curvature[place]
                total.assign_add(ops.cast(d, total.dtype) / self.gradient_accumulation_steps)
        return terms

    def _own_curvature(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        if bridge.gradients_are_sums():
            raise RuntimeError(_SUMMED)
        unscaled = self._scaler() is not None  # the scaler has divided the gradients
        found: list[Any] = self.curvature(grads, variables, unscaled)
        scale = None if unscaled else self._loss_scale()
        return found if scale is None else [None if d is None else d / scale for d in found]

    @tf.autograph.experimental.do_not_convert
    def _backend_update_step(
        self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any
    ) -> None:
        """Reduce gradients and D together, by the strategy's reduction."""
        places = [self._get_variable_index(v) for v in trainable_variables]
        terms: Any = self._now.curvature
        if self.gradient_accumulation_steps:
            terms = self._accumulated_curvature
        # A given D may belong to another graph than the gradients, with which it is reduced.
        both = [_Both(g, tf.identity(terms[place])) for g, place in zip(grads, places, strict=True)]
        super()._backend_update_step(both, trainable_variables, learning_rate)

    def _backend_reset_gradient_accumulators(self) -> None:
        super()._backend_reset_gradient_accumulators()
        for total in self._accumulated_curvature:
            if total is not None:
                total.assign(ops.zeros_like(total))

    def update_step(self, gradient: _Both, variable: Any, learning_rate: Any) -> None:
        """Update a variable from its gradient and its D."""
        place = self._get_variable_index(variable)
        m, v = self._momentums[place], self._velocities[place]
        g, d = ops.cast(gradient.gradient, m.dtype), ops.cast(gradient.curvature, m.dtype)
        rate = ops.cast(learning_rate, m.dtype)
        self._update_square(v, averaged(d, self._averages[place], variable))
        correct = rules.bias_correction(self.beta_1, ops.cast(self.iterations + 1, m.dtype))
        correct = tf.where(_has_no_curvature(v), tf.zeros_like(correct), correct)
        decay = self.decay_of(place)
        if self._is_plain_root(variable, m):
            if decay:
                variable.assign_sub(rate * decay * variable)
            self._descend_by_one_op(variable, m, v, g, rate * correct)
            return
        w = ops.cast(variable, m.dtype)
        mean = m + (1 - self.beta_1) * (g - m)
        m.assign(mean)
        update = correct * mean / (self._root(v) + self.epsilon)
        rules.descend(variable, w, rate * rules.decayed(update, w, decay))

    def _is_plain_root(self, variable: Any, m: Any) -> bool:
        """Return whether the update is Adam's, apart from the contents of v."""
        alike = rules.of_one_type(variable, m)
        return alike and self.hessian_power == 1

    def _descend_by_one_op(self, variable: Any, m: Any, v: Any, g: tf.Tensor, rate: Any) -> None:
        """Update in one pass over memory, by Adam's op, which does not change v if beta_2 = 1.

        That op does not correct v; dividing rate and epsilon by the correction's root does.
        """
        root = ops.sqrt(rules.bias_correction(self._kept, self._changes(m.dtype)))
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=native(m).handle,
            v=native(v).handle,
            beta1_power=tf.zeros((), g.dtype),
            beta2_power=tf.zeros((), g.dtype),
            lr=rate / root,
            beta1=tf.constant(self.beta_1, g.dtype),
            beta2=tf.ones((), g.dtype),
            epsilon=self.epsilon / root,
            grad=g,
        )

    def _update_square(self, v: Any, d: tf.Tensor) -> None:
        """Update v from the D of this step."""
        square = tf.broadcast_to(ops.square(d), v.shape)
        correct = functools.partial(rules.bias_correction, self._kept)
        now = self._changes(v.dtype)

        def begin() -> None:
            v.assign(square / correct(now))

        def go_on() -> None:
            v.assign(v + (1 - self._kept) * (square - v))

        def use() -> None:
            tf.cond(_has_no_curvature(v), begin, go_on)

        def leave() -> None:
            """Keep the root, as this step corrects it, equal to that of the last step."""
            same = v * (correct(ops.maximum(now - 1, 1)) / correct(now))
            none = tf.logical_or(now <= 1, _has_no_curvature(v))
            v.assign(tf.where(none, tf.as_dtype(v.dtype).max, same))

        def update() -> None:
            tf.cond(tf.reduce_all(tf.math.is_finite(square)), use, leave)

        self._when_due(update, lambda: None)

    @property
    def _kept(self) -> float:
        """Decay rate of v for each change."""
        return float(self.beta_2**self.update_each)

    def _changes(self, dtype: Any) -> Any:
        """Return how often v has changed, including this step."""
        return ops.cast(self.iterations // self.update_each + 1, dtype)

    def _root(self, v: Any) -> Any:
        """Return the estimate of the curvature's size."""
        hat = rules.bias_correction(self._kept, self._changes(v.dtype)) * v
        return ops.sqrt(hat) if self.hessian_power == 1 else ops.power(hat, self.hessian_power / 2)

    # ----------------------------------------------------------------- Keras

    def _maybe_initialize_trackable(self) -> None:
        """Follow a model that this optimizer becomes an attribute of; TensorFlow calls this.

        Keras does not tell an optimizer its model, and the model's steps may run eagerly. Under
        Keras 2 an optimizer that scales the loss passes the call on, so the model may be its
        caller.
        """
        super()._maybe_initialize_trackable()
        model = caller(keras.Model, levels=3)
        if model is not None:
            follow(model)

    def get_config(self) -> dict[str, Any]:
        """Return all arguments, in types that JSON knows."""
        averaging = self.averaging
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "hessian_power": self.hessian_power,
            "samples": self.samples,
            "update_each": self.update_each,
            "averaging": (
                keras.saving.serialize_keras_object(averaging) if callable(averaging) else averaging
            ),
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> AdaHessian:
        """Make the optimizer that ``get_config`` describes."""
        averaging = config.get("averaging")
        if isinstance(averaging, dict) and "class_name" in averaging:
            function = keras.saving.deserialize_keras_object(averaging, custom_objects)
            config = {**config, "averaging": function}
        made: AdaHessian = super().from_config(config, custom_objects)
        return made


_NOT_RECORDED = (
    "AdaHessian received eager gradients, and cannot see how they were computed. In a loop of "
    "your own, compute, differentiate and apply within `with optimizer.recording():`, or within "
    "one tf.function. model.fit does so by itself, unless the model was compiled with another "
    "optimizer before, or this one was put into a LossScaleOptimizer by hand: then call "
    "optimizer.follow(model) once, before fit."
)

_SUMMED = (
    "AdaHessian received gradients that are sums over replicas, and cannot measure its own "
    "replica's curvature. Under Keras 2 it needs tfscale.ScaleStrategy: make the optimizer, or "
    "compile the model, in its scope, and let apply_gradients sum."
)


_UNKNOWN_SCALER = (
    "AdaHessian must know by how much its loss is scaled, and something other than Keras's "
    "LossScaleOptimizer set %s. Wrap it as keras's LossScaleOptimizer(AdaHessian(...)), or, if "
    "nothing scales the loss, %s."
)


def _has_no_curvature(v: Any) -> tf.Tensor:
    """Return whether a variable has had only unusable D so far.

    Its v is then the largest finite number, not Inf, since TensorFlow's op of Adam makes NaN of
    Inf.
    """
    first = tf.reshape(v, [-1])[:1]
    return tf.reduce_any(tf.equal(first, first.dtype.max))


def _no_scaler() -> None:
    """Return None: nothing scales the loss."""
    return None


def _unknown_scaler() -> None:
    """Raise: an unknown optimizer scales the loss, so D would be of the scaled loss."""
    raise RuntimeError(_UNKNOWN_SCALER % bridge.HOW_A_WRAPPEE_IS_TOLD)


def _power_of_2_near_root(scale: Any) -> Any:
    exponent = ops.round(ops.log2(ops.cast(scale, "float32")) / 2)
    return ops.power(2.0, exponent)
