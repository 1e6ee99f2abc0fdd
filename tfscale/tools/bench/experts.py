"""``tfscale bench experts``: ``Experts`` beside a layer whose experts all compute all tokens.

The rival computes as the mixtures of experts of keras_hub do: each expert computes each token, and
the outputs of those that the router has not chosen are multiplied by 0. All contestants share the
weights, and take turns.

- ``forward``: the output of a layer.
- ``step``: the output, and the gradient by the input and all weights.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfscale.tools.bench import machine
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of, whole_number
from tfscale.tools.bench.measure import in_turn
from tfscale.tools.bench.optimizers import make_table

if TYPE_CHECKING:
    import tensorflow as tf

Layer = Callable[["tf.Tensor"], "tf.Tensor"]


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench experts``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about = machine.describe()
    console = make_console()
    sizes = (arguments.experts, arguments.k, arguments.tokens, arguments.features, arguments.units)
    layer, tokens = _layer(*sizes)
    what = "{} experts, k={}, {} tokens of {} features, {} hidden units".format(*sizes)
    for part in arguments.parts:
        times = in_turn(_calls(layer, tokens, PARTS[part]), arguments.rounds)
        console.print(make_table(f"{part}: {what}", times))
    console.print(machine.signature(about, "experts", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench experts``."""
    parser = bench_parser(
        "experts", "Measure a layer of experts beside one whose experts compute all tokens."
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(PARTS)), default=",".join(PARTS), metavar="NAME,...",
        help="what to measure (default: %(default)s)")  # fmt: skip
    for name, size, text in (
        ("experts", 8, "number of experts"),
        ("k", 2, "number of experts of each token"),
        ("tokens", 2048, "number of tokens"),
        ("features", 512, "width of a token"),
        ("units", 2048, "hidden units of each expert"),
        ("rounds", 10, "turns of each call"),
    ):
        add(f"--{name}", type=whole_number, default=size, metavar="N",
            help=f"{text} (default: %(default)s)")  # fmt: skip
    return parser


def _layer(experts: int, k: int, tokens: int, features: int, units: int) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    from tfscale.parallel import Experts

    keras.utils.set_random_seed(0)
    layer = Experts(experts, units, k, activation="relu", balance=0)
    x = tf.random.normal([tokens, features])
    layer(x)
    return layer, x


def all_experts(layer: Any, x: Any) -> Any:
    """Return the output of a layer of experts, all of which compute all tokens."""
    import tensorflow as tf

    router, up, up_bias, down, down_bias = (v.value for v in layer.trainable_weights)
    best, chosen = tf.math.top_k(tf.nn.softmax(x @ router), layer.k)
    gates = best / tf.reduce_sum(best, -1, keepdims=True)
    of_expert = tf.reduce_sum(tf.one_hot(chosen, layer.experts) * gates[..., tf.newaxis], 1)
    hidden = layer.activation(tf.einsum("th,ehm->etm", x, up) + up_bias[:, tf.newaxis])
    outputs = tf.einsum("etm,emh->eth", hidden, down) + down_bias[:, tf.newaxis]
    return tf.reduce_sum(outputs * tf.transpose(of_expert)[..., tf.newaxis], 0)


def _gradients(layer: Layer, weights: list[Any], x: Any) -> Any:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.square(layer(x)))
    return tape.gradient(loss, [x, *weights])


def _forward(layer: Layer, weights: list[Any], x: Any) -> Any:
    return layer(x)


PARTS: dict[str, Callable[[Layer, list[Any], Any], Any]] = {
    "forward": _forward,
    "step": _gradients,
}


def _calls(layer: Any, x: Any, part: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    import tensorflow as tf

    weights = [v.value for v in layer.trainable_weights]
    every = functools.partial(all_experts, layer)
    contestants: dict[str, tuple[Layer, bool]] = {
        "chosen experts": (layer, False),
        "all experts": (every, False),
        "all experts, by XLA": (every, True),
    }
    return {
        name: functools.partial(
            tf.function(functools.partial(part, call, weights), autograph=False, jit_compile=xla), x
        )
        for name, (call, xla) in contestants.items()
    }
