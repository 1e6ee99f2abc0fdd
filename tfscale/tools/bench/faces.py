"""The three nets of MTCNN, which find faces, with few bits: weights of PyPI's ``mtcnn``.

The 200 crops are those that PyPI's ``scikit-image`` contains: 100 faces and 100 other ones. The
study and the plan see 100 of them, and the other 100 are the test.
"""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = (2, 3, 4, 6, 8)
SIZES = ("25%", "18.75%", "12.5%")
NETS = ("pnet", "rnet", "onet")
_PACKAGES = "pip install mtcnn scikit-image lz4 joblib"
_SIDES = {"pnet": 12, "rnet": 24, "onet": 48}
_TRUNKS: dict[str, list[tuple[Any, ...]]] = {
    "pnet": [(10, 3, (2, 2, "same")), (16, 3, None), (32, 3, None)],
    "rnet": [(28, 3, (3, 2, "same")), (48, 3, (3, 2, "valid")), (64, 2, None)],
    "onet": [
        (32, 3, (3, 2, "same")), (64, 3, (3, 2, "valid")), (64, 3, (2, 2, "same")), (128, 2, None),
    ],
}  # fmt: skip
_DENSE = {"rnet": 128, "onet": 256}


def build(name: str) -> Any:
    """Return a net with the weights of the package; it answers whether a crop is a face.

    The heads for boxes and landmarks are left out.
    """
    import keras

    layers = keras.layers
    first = keras.Input([_SIDES[name]] * 2 + [3])
    x = first
    for i, (filters, size, pool) in enumerate(_TRUNKS[name], 1):
        x = layers.Conv2D(filters, size, name=f"conv{i}")(x)
        x = layers.PReLU(shared_axes=[1, 2], name=f"prelu{i}")(x)
        if pool:
            x = layers.MaxPooling2D(*pool, name=f"pool{i}")(x)
    if name in _DENSE:
        x = layers.Flatten()(layers.Permute((2, 1, 3))(x))
        x = layers.PReLU(name="prelu")(layers.Dense(_DENSE[name], name="dense")(x))
        x = layers.Dense(2, activation="softmax", name="face")(x)
    else:
        x = layers.Reshape([2])(layers.Conv2D(2, 1, activation="softmax", name="face")(x))
    model = keras.Model(first, x, name=name)
    model.set_weights(_weights(name, model))
    model.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def _weights(name: str, model: Any) -> list[np.ndarray]:
    """Return the weights of the package's file that are those of the trunk and of the class."""
    try:
        import joblib

        found = joblib.load(str(resources.files("mtcnn.assets.weights") / f"{name}.lz4"))
    except ImportError as error:
        raise ImportError(f"the part faces needs other packages: {_PACKAGES}") from error
    trunk = len(model.get_weights()) - 2
    return [*found[:trunk], *_class_head(found[trunk:])]


def _class_head(heads: list[np.ndarray]) -> list[np.ndarray]:
    """Return kernel and bias of the head with two outputs."""
    pairs = zip(heads[::2], heads[1::2], strict=True)
    return next([kernel, bias] for kernel, bias in pairs if bias.shape == (2,))


def crops(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return 200 crops as the nets expect them, and whether each is a face."""
    import tensorflow as tf

    found = importlib.util.find_spec("skimage")  # only a file of it is needed
    if found is None or found.origin is None:
        raise ImportError(f"the part faces needs other packages: {_PACKAGES}")
    gray = np.load(Path(found.origin).parent / "data" / "lfw_subset.npy")
    x = np.repeat(np.asarray(gray, np.float32)[..., None], 3, axis=-1) * 255
    x = tf.image.resize(x, [side, side], antialias=True).numpy()
    order = np.random.default_rng(0).permutation(len(x))
    y = (np.arange(len(x)) < len(x) // 2).astype(np.int32)
    return ((x - 127.5) / 128)[order], y[order]


def compare(name: str) -> list[dict[str, Any]]:
    """Return for each size the test accuracies of a plan by the Hessian and by the error, and of
    the same width for all layers, without any training.
    """
    from tfscale.analysis.quantize import apply, plan, sensitivity

    model = build(name)
    x, y = crops(_SIDES[name])
    half = len(x) // 2
    known, test = (x[:half], y[:half]), (x[half:], y[half:])
    studies = {
        by: sensitivity(
            model, *known, by=by, bits=WIDTHS, trained=True, batch_size=half, progress=False
        )
        for by in ("trace", "error")
    }
    reference = model.predict(x, verbose=0)

    def judged(bits: Any) -> tuple[float, float, float]:
        small = apply(model, bits)
        loss, accuracy = small.evaluate(*test, verbose=0, batch_size=half)
        off = np.abs(small.predict(x, verbose=0) - reference)[:, 1].mean()
        return float(loss), float(100 * accuracy), float(off)

    loss, accuracy = model.evaluate(*test, verbose=0, batch_size=half)
    rows = [{"size": "100%", "float": (float(loss), float(100 * accuracy), 0.0)}]
    for size in SIZES:
        row: dict[str, Any] = {"size": size}
        for by, study in studies.items():
            found = plan(study, size=size)
            row[by] = (*judged(found), list(found.bits.values()))
        uniform = max(b for b in WIDTHS if b <= 0.32 * float(size[:-1]) + 1e-9)
        row["uniform"] = (*judged(dict.fromkeys(found.bits, uniform)), uniform)
        rows.append(row)
    return rows
