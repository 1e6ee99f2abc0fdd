"""Complaints about several workers, each a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.gallery.parts import BATCH, ROWS, classes, fit, fit_and_judge, images, random
from tests.pains.complaint import Complaint
from tfscale.tools.bench.measure import meet

SIDE, KINDS = 8, 3


def convolutional():
    """The network of TensorFlow's tutorial, for smaller images."""
    model = keras.Sequential(
        [
            keras.Input([SIDE, SIDE]),
            layers.Reshape([SIDE, SIDE, 1]),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Dense(KINDS),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=["accuracy"])
    return model


def pictures():
    return images(SIDE)[..., 0]


def kinds():
    return classes(KINDS)


def endless():
    """Shuffled, repeated and batched, in the order in which the tutorial says it."""
    rows = tf.data.Dataset.from_tensor_slices((pictures(), kinds()))
    return rows.shuffle(ROWS, seed=1).repeat().batch(BATCH)


def once():
    """An epoch that workers cannot share evenly: its last batch has one row."""
    return tf.data.Dataset.from_tensor_slices((pictures(), kinds())).batch(BATCH)


def two_inputs():
    inputs = {"wide": keras.Input([4], name="wide"), "deep": keras.Input([6], name="deep")}
    deep = layers.Dense(8, activation="relu")(inputs["deep"])
    outputs = layers.Dense(1)(layers.Concatenate()([inputs["wide"], deep]))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def dictionaries():
    inputs = {"wide": random(ROWS, 4), "deep": random(ROWS, 6)}
    return tf.data.Dataset.from_tensor_slices((inputs, random(ROWS, 1, seed=1))).batch(BATCH)


def shared(name: str) -> str:
    """A path that is the same on all workers."""
    return str(Path(os.environ["MEETING"], name))


def index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"]).get("task", {"index": 0})["index"])


def wait_for_all(name: str) -> None:
    """Wait until all workers are here: whoever reads a file waits for those who write it."""
    meet(os.environ["MEETING"], name, index(), int(os.environ["LAYOUT"].split("x")[0]))


def furthest(model: keras.Model, other: keras.Model) -> float:
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.max(np.abs(one - two))) for one, two in pairs)


def save_by_all(model):
    """All workers save to one path, again and again, in every format, and all read the files."""
    seen = fit(once, batch_size=None)(model)
    for turn in range(20):
        wait_for_all(f"save {turn}")
        model.save(shared("saved.keras"))
        model.save(shared("saved.h5"))
        model.save_weights(shared("saved.weights.h5"))
    wait_for_all("saved")
    for name in ("saved.keras", "saved.h5"):
        seen[f"lost in {name}"] = furthest(model, keras.models.load_model(shared(name)))
    other = convolutional()
    other.load_weights(shared("saved.weights.h5"))
    return seen | {"lost in weights": furthest(model, other)}


def checkpoint_where_all_do(model):
    """Keras's callbacks, with paths that are the same on all workers."""
    callbacks = [
        keras.callbacks.ModelCheckpoint(shared("whole-{epoch}.keras")),
        keras.callbacks.ModelCheckpoint(shared("{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.TensorBoard(shared("logs")),
    ]
    seen = fit(once, batch_size=None, epochs=3, callbacks=callbacks)(model)
    wait_for_all("checkpoints")
    seen["lost in whole"] = furthest(model, keras.models.load_model(shared("whole-3.keras")))
    before = model.get_weights()
    model.load_weights(shared("3.weights.h5"))
    pairs = zip(before, model.get_weights(), strict=True)
    return seen | {"lost in weights": max(float(np.max(np.abs(a - b))) for a, b in pairs)}


def fit_again_and_again(model):
    """Epochs after epochs of which the last batch has too few rows for all workers."""
    seen = {}
    for turn in range(3):
        history = fit(once, batch_size=None, epochs=3)(model)
        seen |= {f"{name} {turn}": value for name, value in history.items()}
    return seen


def of_workers(*parts, **settings):
    return Complaint(*parts, layout="2x1", **settings)


COMPLAINTS = {
    "keras#20585": of_workers(
        convolutional,
        fit(endless, batch_size=None, epochs=3, steps_per_epoch=4),
        title="Does Keras 3 work with `tf.distribute.MultiWorkerMirroredStrategy`?",
    ),
    "tf#72388": of_workers(
        convolutional,
        fit_and_judge(pictures, kinds),
        title=(
            "`tf.distribute` and `keras` 3 incompatibility: ValueError: Invalid reduction "
            "dimension 0 for input with 0 dimensions."
        ),
    ),
    "keras#20329": of_workers(
        two_inputs,
        fit(dictionaries, batch_size=None),
        title="Tensorflow MultiWorkerMirroredStrategy and input dictionaries",
    ),
    "tf#38635": of_workers(
        convolutional,
        save_by_all,
        title="How to Save Model with TF2.x Keras Multiworker Distributed Training?",
    ),
    "tf#31252": of_workers(
        convolutional,
        checkpoint_where_all_do,
        title="Model can't be checkpointed with Keras+MultiworkerMirroredStrategy",
    ),
    "tf#35878": of_workers(
        convolutional,
        fit_again_and_again,
        title="MultiWorkerMirroredStrategy Keras Example Hangs",
    ),
}
