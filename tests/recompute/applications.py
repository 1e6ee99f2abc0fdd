"""Trains the nets of ``keras.applications`` on small images, with and without recomputation.

``python -m tests.recompute.applications [NET ...]`` prints a table, net by net, each with oneDNN
and without it in a process of its own. A cell says which share of a step's memory was planned, and
whether two steps gave the same bits as without recomputation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

from tfscale.bridge.grappler import sums_in_order
from tfscale.callbacks import Recompute
from tfscale.recompute import BudgetError

# Pixels; others: 32. (Of 32, EfficientNetV2S makes NaN, which nothing can be compared with.)
SMALLEST = {"Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75, "EfficientNetV2S": 64}
NETS = (
    *("VGG16", "ResNet50", "ResNet50V2", "ResNet101", "Xception", "InceptionV3"),
    *("InceptionResNetV2", "MobileNet", "MobileNetV2", "MobileNetV3Small", "MobileNetV3Large"),
    *("DenseNet121", "NASNetMobile", "EfficientNetB0", "EfficientNetB3", "EfficientNetV2B0"),
    *("EfficientNetV2S", "ConvNeXtTiny"),
)
WAYS = ("sqrt", 0.5, 0.3)
# Without recomputation TensorFlow may add up in another order: see bridge/grappler.py.
IN_ORDER = "same, where sums keep their order"
BIASES = {"as it is": None, "all": True, "none": False}


def build(net, bias):
    """The net; all of its layers that may have a bias with one, or without, if that is asked."""
    size = SMALLEST.get(net, 32)
    made = getattr(keras.applications, net)(
        weights=None, classes=10, input_shape=(size, size, 3), classifier_activation=None
    )

    def clone(layer):
        config = layer.get_config()
        if "use_bias" in config:
            config["use_bias"] = bias
        return type(layer).from_config(config)

    return made if bias is None else keras.models.clone_model(made, clone_function=clone)


def train(net, bias, callback=None):
    """All variables after two steps, and the losses."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    model = build(net, bias)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, *model.inputs[0].shape[1:]), np.float32)
    y = rng.integers(0, 10, (4, 1))
    callbacks = [callback] if callback else []
    history = model.fit(x, y, 2, verbose=0, shuffle=False, callbacks=callbacks)
    return {v.path: v.numpy() for v in model.variables}, history.history["loss"]


def compare(net, bias, ways=WAYS):
    """Return for each way to choose recomputed layers the planned share, and the differences.

    A share that can't be reached gives way to the smallest that can.
    """
    plain, losses = train(net, bias)
    assert np.isfinite(losses).all(), f"{net} does not train as it is: its loss is {losses}"

    @functools.cache
    def plain_in_order():
        with sums_in_order():
            return train(net, bias)[0]

    found = {}
    for way in ways:
        callback, (ours, our_losses) = _train_so(net, bias, way)
        different = _different(plain, ours)
        if losses != our_losses:
            different.append("the loss")
        if different:
            different = _different(plain_in_order(), ours) or [IN_ORDER]
        plan = callback.plan
        found[way] = (plan.peak / plan.plain_peak, len(plan.again), different)
    return found


def _different(some, others):
    return [name for name in some if some[name].tobytes() != others[name].tobytes()]


def _train_so(net, bias, way):
    choice = {"segments": way} if way == "sqrt" else {"fraction": way}
    callback = Recompute(**choice, verbose=0)
    try:
        return callback, train(net, bias, callback)
    except BudgetError as refused:
        callback = Recompute(budget=refused.smallest, verbose=0)
        return callback, train(net, bias, callback)


# ------------------------------------------------------------------ the table


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nets", nargs="*", default=NETS)
    parser.add_argument("--biases", nargs="+", choices=BIASES, default=("all", "none"))
    parser.add_argument("--here", action="store_true", help="in this process, as a line of JSON")
    asked = parser.parse_args()
    if asked.here:
        ((net,), (biases,)) = asked.nets, asked.biases
        print(json.dumps(list(compare(net, BIASES[biases]).items())))
        return
    print("| net | biases | oneDNN | " + " | ".join(map(str, WAYS)) + " |")
    print("|---" * (3 + len(WAYS)) + "|", flush=True)
    for net in asked.nets:
        for biases in asked.biases:
            for onednn in ("on", "off"):
                cells = [_cell(*told) for _, told in in_a_process(net, biases, onednn)]
                print(f"| {net} | {biases} | {onednn} | " + " | ".join(cells) + " |", flush=True)


def in_a_process(net, biases, onednn):
    command = [sys.executable, "-m", "tests.recompute.applications", net, "--here"]
    ran = subprocess.run(
        [*command, "--biases", biases],
        env={**os.environ, "TF_ENABLE_ONEDNN_OPTS": str(int(onednn == "on"))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        return [(way, (0.0, 0, [ran.stderr[-300:]])) for way in WAYS]
    return json.loads(ran.stdout.splitlines()[-1])


def _cell(share, segments, different):
    same = "same" if not different else f"DIFFERENT: {len(different)} ({different[0]})"
    if different == [IN_ORDER]:
        same = IN_ORDER
    return f"{share:.0%}, {segments} segments: {same}"


if __name__ == "__main__":
    main()
