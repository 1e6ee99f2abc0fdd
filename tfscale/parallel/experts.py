"""``Experts``: a layer of many small networks, of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.exchange.scaling import scaling
from tfscale.parallel.dispatch import Dispatch
from tfscale.support import arguments

# Computes rows that are sorted by expert, given the number of rows of each expert.
Compute = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

_NEEDS_KERAS_3 = "Experts needs Keras 3, and this is Keras 2: install Keras 3"
_NO_FEATURES = (
    "the experts of {name} need to know the size of the last axis of their input, and its shape is "
    "{shape}. Give the input a known last axis"
)
_CHOICES = "a whole number up to experts={}"
_AN_ACTIVATION = "an activation of Keras, such as 'gelu'"
_AN_INITIALIZER = "an initializer of Keras, such as 'he_normal'"
_A_REGULARIZER = "a regularizer of Keras, such as 'l2'"


@keras.saving.register_keras_serializable(package="tfscale")
class Experts(keras.layers.Layer):
    r"""Layer of experts: small networks of two dense layers, of which each token uses ``k``.

    A token is a vector :math:`x` of the last axis of the input. A router gives each expert a
    probability, :math:`p = \mathrm{softmax}(W x)`. The token goes to the :math:`k` experts of the
    largest :math:`p_e`, and the output is

    .. math:: y = \sum_{e \in \mathrm{top}_k} g_e \, f_e(x), \qquad
        g_e = \frac{p_e}{\sum_{i \in \mathrm{top}_k} p_i}, \qquad
        f_e(x) = V_e \, a(U_e x + b_e) + c_e,

    with :math:`g_e = p_e` for :math:`k = 1`, since the router would get no gradient otherwise. The
    router computes in float32, or in float64 if the layer does.

    Only chosen experts compute: with 8 experts and ``k=2``, a token costs a quarter of what all
    experts would cost. No token is dropped, unless you pass a ``capacity``.

    **Balance.** The layer adds a loss that is smallest if all experts get equally many tokens:

    .. math:: \lambda E \sum_e f_e P_e,

    where :math:`f_e` is the share of the assignments that go to expert e, :math:`P_e` the mean of
    :math:`p_e` over the tokens, and :math:`\lambda` the argument ``balance``. With
    ``ScaleStrategy``, both are means over the tokens of the global batch, so the loss is that of
    one device.

    **Many devices.** With ``ScaleStrategy(grid=tfscale.Grid(experts=N))``, each replica holds 1/N
    of the experts, and tokens travel to them and back: see docs/large-models.md. Without the axis
    ``experts``, each replica holds all of them.

    Args:
        experts: number of experts.
        units: number of hidden units of each expert.
        k: number of experts that each token goes to.
        activation: activation of the hidden units, as Keras knows it.
        capacity: in training, an expert takes at most ``capacity`` times as many assignments as
            there would be if all experts got equally many, rounded up: first choices before second
            ones, then in the order of the batch. Further assignments are *dropped*: they add
            nothing to the output of their token. The metric ``<name>_dropped`` is their share. By
            default, and outside of training, nothing is dropped.
        balance: factor of the loss for balance; 0 for none.
        use_bias: whether experts have biases.
        kernel_initializer: initializer of each expert's kernels; experts get different values.
        bias_initializer: initializer of the experts' biases.
        router_initializer: initializer of the router's kernel.
        kernel_regularizer: regularizer of the experts' kernels.
        kwargs: arguments of ``keras.layers.Layer``.

    Input and output have the shape ``(..., features)``. Masked tokens go to no expert: they get
    zeros, and count nowhere.

    Example:
        >>> layer = tfscale.parallel.Experts(8, units=1024, k=2)
        >>> print(layer(np.ones((2, 5, 16), "float32")).shape)
        (2, 5, 16)

    Reference:
        Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts
        layer", https://arxiv.org/abs/1701.06538; Lepikhin et al., "GShard",
        https://arxiv.org/abs/2006.16668; Fedus et al., "Switch transformers",
        https://arxiv.org/abs/2101.03961.
    """

    # Names of the weights of which each expert has its own part, along the first axis.
    NAMES = ("up", "up_bias", "down", "down_bias")

    def __init__(
        self,
        experts: int,
        units: int,
        k: int = 2,
        *,
        activation: Any = "gelu",
        capacity: float | None = None,
        balance: float = 0.01,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        router_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if KERAS_2:
            raise ValueError(_NEEDS_KERAS_3)
        super().__init__(**kwargs)
        self.experts = arguments.whole(experts, "experts", least=1)
        self.units = arguments.whole(units, "units", least=1)
        what = _CHOICES.format(self.experts)
        self.k = arguments.whole(k, "k", 1, self.experts, what=what)
        self.capacity = None if capacity is None else arguments.real(capacity, "capacity", above=0)
        self.balance = arguments.real(balance, "balance", least=0)
        self.use_bias = arguments.flag(use_bias, "use_bias")
        optional = arguments.optional
        self.activation = optional(_of_keras, activation, "activation", _AN_ACTIVATION)
        self.kernel_initializer = _of_keras(
            kernel_initializer, "kernel_initializer", _AN_INITIALIZER
        )
        self.bias_initializer = _of_keras(bias_initializer, "bias_initializer", _AN_INITIALIZER)
        self.router_initializer = _of_keras(
            router_initializer, "router_initializer", _AN_INITIALIZER
        )
        self.kernel_regularizer = optional(
            _of_keras, kernel_regularizer, "kernel_regularizer", _A_REGULARIZER
        )
        self.supports_masking = True
        self.supports_jit = False  # XLA needs to know how many rows each expert gets
        self.dropped = None
        if capacity is not None:
            self.dropped = keras.metrics.Mean(f"{self.name}_dropped")

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the weights; Keras calls this."""
        features = input_shape[-1]
        if features is None:
            raise ValueError(_NO_FEATURES.format(name=self.name, shape=tuple(input_shape)))
        self.router = self.add_weight(
            name="router",
            shape=(features, self.experts),
            initializer=self.router_initializer,
            autocast=False,
        )
        for name, shape in (("up", (features, self.units)), ("down", (self.units, features))):
            kernel = self.add_weight(
                name=name,
                shape=(self.experts, *shape),
                initializer=_of_each(self.kernel_initializer),
                regularizer=self.kernel_regularizer,
            )
            setattr(self, name, kernel)
            bias = None
            if self.use_bias:
                bias = self.add_weight(
                    name=f"{name}_bias",
                    shape=(self.experts, shape[1]),
                    initializer=_of_each(self.bias_initializer),
                )
            setattr(self, f"{name}_bias", bias)
        self.built = True

    def call(self, inputs: Any, mask: Any = None, training: bool | None = None) -> Any:
        """Return the experts' output; Keras calls this."""
        return self.routed(inputs, mask, training, self.computed)

    def routed(
        self, inputs: tf.Tensor, mask: tf.Tensor | None, training: bool | None, compute: Compute
    ) -> tf.Tensor:
        """Return the output of the experts that the router chooses.

        Args:
            inputs: the layer's input.
            mask: for each token, whether it counts; None if all do.
            training: whether the layer trains.
            compute: computes the experts' outputs, on this replica or on several.
        """
        features = inputs.shape[-1]
        tokens = tf.reshape(inputs, [-1, features])
        held = None if mask is None else _of_tokens(mask, inputs)
        probabilities = self._probabilities(tokens)
        best, chosen = tf.math.top_k(probabilities, self.k)
        gates = best if self.k == 1 else best / tf.reduce_sum(best, -1, keepdims=True)
        assigned = self._assignments(chosen, held)
        if self.balance:
            self._add_balance(probabilities, assigned, held)
        some_are_left_out = held is not None
        if self.capacity is not None and training:
            assigned = self._within_capacity(assigned, held)
            some_are_left_out = True
        dispatch = Dispatch.of(assigned, self.experts, self.k, lacks_some=some_are_left_out)
        rows = compute(dispatch.rows(tokens), dispatch.counts)
        results = dispatch.results(rows)
        weights = tf.cast(tf.transpose(gates)[..., tf.newaxis], results.dtype)
        output = tf.reshape(tf.reduce_sum(results * weights, 0), tf.shape(inputs))
        return tf.ensure_shape(output, inputs.shape)

    def computed(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Return what experts make of rows that are sorted by expert.

        Args:
            rows: rows of tokens.
            counts: number of rows of each expert; if this replica has a part of the experts'
                weights, of each expert of this part.
        """
        every = [self._by_expert(name, rows.dtype) for name in self.NAMES]
        parts = []
        for expert, part in enumerate(tf.split(rows, counts)):
            up, up_bias, down, down_bias = (each and each[expert] for each in every)
            hidden = _dense(part, up, up_bias)
            if self.activation is not None:
                hidden = self.activation(hidden)
            parts.append(_dense(hidden, down, down_bias))
        return tf.concat(parts, 0)

    def _by_expert(self, name: str, dtype: tf.DType) -> list[tf.Tensor] | None:
        """Return a weight as each expert has it; None if experts do not have it."""
        weight = getattr(self, name)
        if weight is None:
            return None
        own: list[tf.Tensor] = tf.unstack(tf.cast(tf.convert_to_tensor(weight), dtype))
        return own

    def _probabilities(self, tokens: tf.Tensor) -> tf.Tensor:
        dtype = tf.float64 if tokens.dtype == tf.float64 else tf.float32
        router = tf.cast(tf.convert_to_tensor(self.router), dtype)
        return tf.nn.softmax(tf.matmul(tf.cast(tokens, dtype), router))

    def _assignments(self, chosen: tf.Tensor, held: tf.Tensor | None) -> tf.Tensor:
        """Return the expert of each assignment; ``experts`` for a masked token."""
        assigned = tf.transpose(chosen)  # all first choices come before all second ones
        if held is not None:
            assigned = tf.where(held, assigned, self.experts)
        return tf.reshape(assigned, [-1])

    # -- balance

    def _add_balance(
        self, probabilities: tf.Tensor, assigned: tf.Tensor, held: tf.Tensor | None
    ) -> None:
        dtype = probabilities.dtype
        if held is not None:
            probabilities = tf.where(held[:, tf.newaxis], probabilities, 0)
        counts = tf.math.unsorted_segment_sum(
            tf.ones_like(assigned, dtype), assigned, self.experts + 1
        )
        own = tf.concat([tf.reduce_sum(probabilities, 0), counts[: self.experts]], 0)

        def loss() -> tf.Tensor:
            of_router, of_choices = tf.split(_summed(own), 2)
            assignments = tf.reduce_sum(of_choices)  # k for each token
            shares = tf.math.divide_no_nan(of_choices, assignments)
            means = tf.math.divide_no_nan(of_router, assignments / self.k)
            return self.balance * self.experts * tf.reduce_sum(tf.stop_gradient(shares) * means)

        ours = scaling(tf.distribute.get_strategy()) if _is_on_a_replica() else None
        self.add_loss(loss() if ours is None else ours.part_of_mean(loss))

    # -- capacity

    def _within_capacity(self, assigned: tf.Tensor, held: tf.Tensor | None) -> tf.Tensor:
        """Return the assignments, of which those that are too many for their expert are nobody's.

        Tokens of replicas whose rows come earlier in the batch go first.
        """
        assert self.capacity is not None and self.dropped is not None
        dispatch = Dispatch.of(assigned, self.experts, self.k, lacks_some=held is not None)
        choice = tf.repeat(tf.range(self.k), tf.size(assigned) // self.k)
        cell = choice * (self.experts + 1) + assigned
        cells = self.k * (self.experts + 1)
        own = tf.math.unsorted_segment_sum(tf.ones_like(cell), cell, cells)
        earlier, total = _before_and_all(own)
        own, earlier, total = (
            tf.reshape(x, [self.k, self.experts + 1]) for x in (own, earlier, total)
        )
        others = earlier + tf.cumsum(total - own, exclusive=True)
        place = dispatch.ranks_of_assignments + tf.gather(tf.reshape(others, [-1]), cell)
        counted = tf.reduce_sum(total[:, : self.experts])
        room = self.capacity * tf.cast(counted, tf.float64) / self.experts
        most = tf.cast(tf.math.ceil(room - 1e-6), place.dtype)  # 1.1 * 10 is 11.000000000000002
        is_dropped = tf.logical_and(place >= most, assigned < self.experts)
        self.dropped.update_state(
            tf.cast(is_dropped, tf.float32), tf.cast(assigned < self.experts, tf.float32)
        )
        return tf.where(is_dropped, self.experts, assigned)

    # -- Keras

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> Sequence[int | None]:
        """Return the input's shape; Keras calls this."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that make this layer."""
        config: dict[str, Any] = super().get_config()
        own = ("experts", "units", "k", "capacity", "balance", "use_bias")
        config |= {name: getattr(self, name) for name in own}
        return config | {
            "activation": self.activation and keras.activations.serialize(self.activation),
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "router_initializer": keras.initializers.serialize(self.router_initializer),
            "kernel_regularizer": self.kernel_regularizer
            and keras.regularizers.serialize(self.kernel_regularizer),
        }


_GETTERS = {
    _AN_ACTIVATION: keras.activations.get,
    _AN_INITIALIZER: keras.initializers.get,
    _A_REGULARIZER: keras.regularizers.get,
}


def _of_keras(value: Any, name: str, expected: str) -> Any:
    """Return the object of Keras that an argument names or is."""
    if not isinstance(value, (str, dict)) and not callable(value):
        raise arguments.wrong(value, name, expected)
    try:
        return _GETTERS[expected](value)
    except Exception as error:  # Keras raises errors of many kinds
        raise arguments.wrong(value, name, expected) from error


def _dense(x: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor | None) -> tf.Tensor:
    product = tf.matmul(x, kernel)
    return product if bias is None else product + bias


def _of_tokens(mask: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Return a mask with one element for each token."""
    mask = tf.cast(mask, tf.bool)
    for _ in range(len(inputs.shape) - 1 - len(mask.shape)):
        mask = mask[..., tf.newaxis]
    return tf.reshape(tf.broadcast_to(mask, tf.shape(inputs)[:-1]), [-1])


# ------------------------------------------------------------------------ replicas


def _is_on_a_replica() -> bool:
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _summed(x: tf.Tensor) -> tf.Tensor:
    """Return the sum over replicas, with its gradient."""
    if not _is_on_a_replica():
        return x
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)


def _before_and_all(counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return counts of the rows that come before this replica's, and of all rows of the batch."""
    ours = scaling(tf.distribute.get_strategy()) if _is_on_a_replica() else None
    return (tf.zeros_like(counts), counts) if ours is None else ours.before_and_all(counts)


# -------------------------------------------------------------------- initial values


def _of_each(initializer: Any) -> Callable[..., Any]:
    """Return an initializer of an array whose parts along the first axis are made one by one.

    An initializer of Keras sees the shape of one expert's kernel: that decides the scale. It gives
    the same values at each call, so each expert gets an initializer with a seed of its own.
    """

    def values(shape: Sequence[int], dtype: Any = None) -> Any:
        experts, *own = shape
        makers = [initializer] * experts
        seed = getattr(initializer, "seed", None)
        if isinstance(seed, int):
            seeds = np.random.default_rng(seed).integers(0, 1 << 31, experts)
            config = initializer.get_config()
            makers = [type(initializer).from_config({**config, "seed": int(s)}) for s in seeds]
        return tf.stack([tf.convert_to_tensor(make(own, dtype=dtype)) for make in makers])

    return values
