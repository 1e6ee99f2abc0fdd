"""All metrics of Keras, on three outputs of one model: each kind of targets that they need."""

from __future__ import annotations

import inspect

import keras
import numpy as np
from keras import layers, metrics

from tests.strategy.models import CLASSES, FEATURES, SGD

# Those that are no metric of targets and predictions, or that are made with a function.
NOT_OF_TARGETS = {metrics.Metric, metrics.Mean, metrics.Sum, metrics.MeanMetricWrapper}

ARGUMENTS = {
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": CLASSES, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
    "FBetaScore": {"average": "macro", "beta": 2.0},
}
OF_KINDS = (
    *("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "F1Score"),
    *("FBetaScore", "KLDivergence", "OneHotIoU", "OneHotMeanIoU", "TopKCategoricalAccuracy"),
    *("ConcordanceCorrelation", "CosineSimilarity", "PearsonCorrelation", "R2Score"),
)
OF_NUMBERS = (
    *("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"),
    *("SparseTopKCategoricalAccuracy", "MeanIoU"),
)


def every():
    """Return a metric of each class that Keras has, by output."""
    found = {"yes": [], "kinds": [], "number": []}
    for name, kind in vars(metrics).items():
        if inspect.isclass(kind) and kind not in NOT_OF_TARGETS:
            output = "kinds" if name in OF_KINDS else "number" if name in OF_NUMBERS else "yes"
            found[output].append(kind(**ARGUMENTS.get(name, {})))
    found["kinds"].append(metrics.MeanMetricWrapper(keras.losses.huber, name="wrapper"))
    found["yes"].append(metrics.AUC(curve="PR", num_thresholds=20, name="area_of_precision"))
    return found


def model(measured, how):
    """A model with these metrics, compiled as ``metrics`` or ``weighted_metrics``."""
    inputs = keras.Input([FEATURES])
    kinds = layers.Dense(CLASSES, activation="softmax", name="kinds")
    outputs = {
        "yes": layers.Dense(1, activation="sigmoid", name="yes")(inputs),
        "kinds": kinds(inputs),
        "number": layers.Activation("linear", name="number")(kinds(inputs)),
    }
    built = keras.Model(inputs, outputs)
    built.compile(SGD(), {"yes": "mse", "kinds": "mse", "number": None}, **{how: measured})
    return built


def data(rows):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, FEATURES), np.float32)
    number = (x @ rng.standard_normal((FEATURES, CLASSES))).argmax(1)
    kinds = np.eye(CLASSES, dtype=np.float32)[number]
    y = {"yes": (x[:, :1] > 0).astype(np.float32), "kinds": kinds, "number": number}
    weights = {name: rng.integers(0, 3, rows).astype(np.float32) for name in y}
    return x, y, weights


def seen(strategy, how, made_in_scope):
    """Return what ``fit`` and ``evaluate`` report; batches of 8 leave one row for the last."""
    keras.backend.clear_session()  # names are counted anew
    keras.utils.set_random_seed(1)
    measured = None if made_in_scope else every()
    with strategy.scope():
        measured = measured or every()
        built = model(measured, how)
    x, y, weights = data(33)
    told = built.fit(
        x, y, 8, sample_weight=weights, validation_data=data(17), shuffle=False, verbose=0
    ).history
    names = {f"{output}_{each.name}" for output, of in measured.items() for each in of}
    assert names <= told.keys() and {f"val_{name}" for name in names} <= told.keys()
    judged = built.evaluate(*data(9)[:2], batch_size=8, verbose=0, return_dict=True)
    return {name: values[0] for name, values in told.items()} | {
        f"evaluate {name}": value for name, value in judged.items()
    }
