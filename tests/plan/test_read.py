"""Keras models as units: operations, weights and activations, counted in TensorFlow's graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import sys

import keras
import numpy as np
import pytest

import tfscale
from tfscale import plan
from tfscale.plan.cluster import RATE
from tfscale.plan.cut import Cut
from tfscale.plan.price import Pricer
from tfscale.tools.plan import main

LAUNCH = (sys.executable, "-m", "tfscale", "launch")


def test_layers_are_counted() -> None:
    model = keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            keras.layers.Conv2D(4, 3, padding="same", use_bias=False, name="conv"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(10, use_bias=False, name="dense"),
        ]
    )
    conv, relu, flat, dense = plan.read(model)
    assert (conv.kind, relu.kind, flat.kind, dense.kind) == ("conv", "plain", "plain", "dense")
    assert conv.flops == 2 * 8 * 8 * 4 * 3 * 3 * 3
    assert conv.backward_flops == pytest.approx(2 * conv.flops, rel=0.02)
    assert (conv.inputs, conv.outputs, conv.kept) == (4 * 192, 4 * 256, 4 * 192)
    assert conv.halo == (4 * 8 * 3, 4 * 8 * 4)  # one row of the image, of each side's channels
    assert dense.flops == 2 * 256 * 10 and dense.kept == 4 * 256
    assert dense.backward_flops == pytest.approx(2 * dense.flops, rel=0.02)
    assert sum(unit.parameters for unit in (conv, relu, flat, dense)) == model.count_params()


@pytest.mark.slow
def test_resnet50_has_the_published_operations() -> None:
    """Check 25.6 million weights, and 3.9 billion products of a forward pass."""
    units = plan.read(keras.applications.ResNet50(weights=None))
    trainable = 25_583_592
    assert sum(unit.parameters for unit in units) == trainable
    assert sum(unit.flops for unit in units) / 2e9 == pytest.approx(3.87, rel=0.02)
    total = sum(unit.all_flops for unit in units)
    assert total == pytest.approx(3 * sum(unit.flops for unit in units), rel=0.02)


class Block(keras.layers.Layer):
    """A block that holds layers of its own."""

    def __init__(self, width: int, **words) -> None:
        super().__init__(**words)
        self.attention = keras.layers.MultiHeadAttention(2, width // 2)
        self.up = keras.layers.Dense(4 * width, "gelu")
        self.down = keras.layers.Dense(width)

    def call(self, x):
        x = x + self.attention(x, x)
        return x + self.down(self.up(x))


class Own(keras.Model):
    """A model that does not know its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(50, 16)
        self.blocks = [Block(16, name=f"block_{n}") for n in range(3)]
        self.head = keras.layers.Dense(50)

    def call(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_subclassed_model_that_was_called_has_shapes() -> None:
    model, x = Own(), np.ones([5, 12], "float32")
    model(x)
    assert plan.read(model) == plan.read(model, x)


def test_a_subclassed_model_asks_for_an_example() -> None:
    model = Own()
    with pytest.raises(ValueError, match="'own.*' has no shapes of inputs.*Pass example="):
        plan.read(model)
    units = plan.read(model, np.ones([5, 12], "int32"))
    assert [unit.kind for unit in units] == ["embedding", "pair", "pair", "pair", "dense"]
    assert {unit.pairs for unit in units[1:4]} == {2}  # attention and perceptron
    kinds = [kind for _, kind in units[1].cuts]
    assert kinds == ["heads", "columns", "rows"]
    weights = [weight.path for weight in model.weights]
    assert all(any(re.search(path, one) for one in weights) for path, _ in units[1].cuts)
    assert len({unit.signature for unit in units[1:4]}) == 1  # equal blocks
    products = 2 * 12 * (4 * 16 * 16 + 2 * 4 * 16 * 16) + 4 * 12 * 12 * 16
    assert products < units[1].flops < 1.2 * products
    assert sum(unit.parameters for unit in units) == model.count_params()
    assert "call" not in vars(model.head)  # nothing stays behind


def test_an_unknown_size_is_named() -> None:
    model = keras.Sequential([keras.Input([None, 4]), keras.layers.LSTM(3)])
    with pytest.raises(ValueError, match=r"inputs of shape \[\(None, None, 4\)\].*Pass example="):
        plan.read(model)
    (lstm,) = plan.read(model, np.ones([2, 7, 4], "float32"))
    weights = model.count_params()
    assert 2 * 7 * weights < lstm.flops < 2 * 7 * weights * 1.3  # each weight in each step


def test_a_layer_that_is_called_twice_counts_its_weights_once() -> None:
    dense = keras.layers.Dense(4, name="dense")
    x = keras.Input([4])
    units = plan.read(keras.Model(x, dense(dense(x))))
    assert [(unit.name, unit.parameters) for unit in units] == [("dense", 20), ("dense#2", 0)]


def test_several_inputs_and_unknown_layers_are_read() -> None:
    class Strange(keras.layers.Layer):
        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(x))

    a, b = keras.Input([6], name="a"), keras.Input([6], name="b")
    model = keras.Model({"a": a, "b": b}, Strange()(keras.layers.Add()([a, b])))
    add, strange = plan.read(model)
    assert add.inputs == 2 * 24 and strange.flops == 12
    assert strange.kind == "plain"


@pytest.mark.parametrize("wrong", [None, "model.keras", 3, keras.layers.Dense(1)])
def test_what_is_no_model_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="model is a Keras model"):
        plan.read(wrong)


def test_a_strategy_takes_the_arguments_of_a_plan() -> None:
    model = keras.Sequential([keras.Input([32]), keras.layers.Dense(8)])
    found = plan.best(model, 64, "2 x (1 device), 10gbit", runnable=True)
    strategy = tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"], **found.strategy_arguments())
    assert strategy.num_replicas_in_sync == found.cut.columns == 2


def pair(wide: int = 64) -> keras.Model:
    """Two layers that a plan cuts in any way."""
    return keras.Sequential(
        [
            keras.Input([32]),
            keras.layers.Dense(wide, "relu", name="up"),
            keras.layers.Dense(8, name="down"),
        ]
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("cut", "given"),
    [
        (Cut(rows=2), ("grid", "tensor")),
        (Cut(stages=2, microbatches=4), ("grid", "pipeline")),
        (Cut(columns=2, shard="all"), ("shard",)),
        (Cut(columns=2, shard="gradients"), ("shard",)),
    ],
)
def test_a_plan_runs_as_one_device_does(cut: Cut, given: tuple[str, ...]) -> None:
    found = plan.best(pair(), 16, "(2 devices, 1GFLOPS), 10gbit")
    price = Pricer(found.units, 16, found.cluster, runnable=True).price(cut)
    found = dataclasses.replace(found, found=dataclasses.replace(found.found, prices=(price,)))
    assert not found.cannot_run()
    words = found.strategy_arguments()
    assert all(name in words for name in given)
    x, y = np.random.default_rng(0).normal(size=(2, 16, 32))
    losses = []
    for strategy in (None, tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"], **words)):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = pair()
            model.compile("sgd", "mse")
        losses.append(model.fit(x, y[:, :8], batch_size=16, epochs=3, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_what_a_grid_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="a key of grid is .*'tensor'.* got 'tensr'"):
        tfscale.ScaleStrategy(grid={"tensr": 2})


def test_measured_layers_take_the_time_of_the_model() -> None:
    model = pair(2048)
    found = plan.measured(model, 256)
    units, rate = found.units, found.rate
    counted = plan.read(model)
    assert [unit.name for unit in units] == ["up", "down"]
    assert [unit.cuts for unit in units] == [unit.cuts for unit in counted]
    total = sum(unit.all_flops for unit in units)
    assert total == pytest.approx(sum(unit.all_flops for unit in counted))
    assert rate > 0 and all(unit.flops > 0 for unit in units)


SCRIPT = """
import keras
def model():
    return keras.Sequential([keras.Input([32]), keras.layers.Dense(64), keras.layers.Dense(8)])
number = 3
"""


def test_the_command(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "train.py").write_text(SCRIPT)
    model, saved = f"{tmp_path / 'train.py'}:model", str(tmp_path / "plan.json")
    words = [model, "--batch", "64", "--cluster", "2 x (2 devices, 16GB, 1TFLOPS), 10gbit"]
    assert main([*words, "--save", saved, "--draw", str(tmp_path / "plan.png")]) == 0
    said = capsys.readouterr().out
    assert "Best: data" in said and "Run it with ScaleStrategy(" in said
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert main([*words, "--here", "--measure"]) == 0
    assert "Measured here: 1 x (8 devices" in capsys.readouterr().out
    assert main([*words, "--measure"]) == 0
    assert re.match(r"This machine reaches [\d.e+-]+ GFLOPS", capsys.readouterr().out)
    curve = ["--curve", "1:128", "--draw", str(tmp_path / "curve.png")]
    assert main([saved, *curve]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[1:-1]] == [str(2**n) for n in range(8)]
    assert rows[-2][-1] == "batch"  # 128 devices, 64 samples
    assert main([saved, "--curve", "1:8", "--scaling", "weak"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "16", "32", "64", "128"
    ]  # fmt: skip


@pytest.mark.slow
def test_the_workers_of_a_job_measure_their_links(tmp_path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*LAUNCH, "-n", "2", sys.executable, "-m", "tfscale", "plan", "train.py:model"]
    ran = subprocess.run(
        [*command, "--here", "--save", "plan.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Measured here") == 1  # one worker speaks for both
    found = plan.Plan.load(tmp_path / "plan.json")
    assert found.cluster.devices == 2 and found.cluster.link.beta > 0
    assert found.cluster.rates != [RATE] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "MODEL is 'train.py'; expected FILE.py:NAME"),
        (["no.py:model"], "there is no file 'no.py'"),
        (["train.py:modl"], "train.py has no 'modl'"),
        (["train.py:number"], "is or returns a int; expected a Keras model"),
        (["train.py:model", "--cluster", "a few"], "cluster is a text such as"),
        (["train.py:model", "--cluster", "(1 device, 1KB)"], "does not fit: the smallest cut"),
        (["train.py:model", "--wires", "int9"], "wires"),
        (["no.json"], "no.json"),
    ],
)
def test_the_command_says_what_is_wrong(words, said: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("tfscale plan: error: ") and said in error
