"""``MACH``: a classifier for very many classes, made of classifiers for few buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.bridge.data import batches_of
from tfscale.support import arguments
from tfscale.training.extreme import fitting, serving
from tfscale.training.extreme.data import check_labels
from tfscale.training.extreme.ensemble import Ensemble
from tfscale.training.extreme.estimators import ESTIMATORS, LOGITS, UNBIASED
from tfscale.training.extreme.files import EARLIER, read_settings
from tfscale.training.extreme.hashing import FAMILY
from tfscale.training.extreme.history import History
from tfscale.training.extreme.labels import Labels
from tfscale.training.extreme.metrics import AtK
from tfscale.training.extreme.planner import confusion_of
from tfscale.training.extreme.search import obstacle

_MOST_BUCKETS = 1 << 24  # float32, in which Keras holds labels, has all whole numbers up to here
_BUILD = "a function that gets a number of buckets and returns a new keras.Model ending in logits"
_NUMBER_OF_CLASSES = {"what": "a number of classes", "example": "10"}


class MACH:
    """A classifier of K classes: R independent classifiers of B buckets, merged by averaging.

    Each repetition hashes the classes into buckets, and trains a model to predict the bucket. A
    class's score is made of the values of its R buckets (Medini et al., NeurIPS 2019).

    If a launcher has started several workers, and no strategy joins them, each worker trains its
    share of the repetitions, and they send nothing. Inside the scope of a strategy of several
    workers all workers train each repetition together.

    Args:
        build: function that gets a number of buckets and returns a new model ending in logits.
        classes: number of classes, or a list of their names.
        buckets: number B of buckets.
        repetitions: number R of repetitions.
        seed: seed of the hash functions.
        multilabel: whether a sample may have any number of labels.
        shared_trunk: whether one model predicts the buckets of all repetitions. ``build`` then gets
            B times R, and the layers before the last are shared.
        estimator: ``"unbiased"``, ``"mean"``, ``"min"`` or ``"median"`` of probabilities, or
            ``"logits"``, the sum of logits. The default is ``"unbiased"``, or ``"logits"`` with
            multilabel.
        folder: folder for trained models. A training that is started again goes on with them.

    Example:
        >>> def build(buckets):
        ...     inputs = keras.Input([8])
        ...     hidden = keras.layers.Dense(16, "relu")(inputs)
        ...     return keras.Model(inputs, keras.layers.Dense(buckets)(hidden))
        >>> mach = tfscale.extreme.MACH(build, classes=10_000, buckets=64, repetitions=4)
        >>> mach.compile("adam")
    """

    def __init__(
        self, build: Callable[[int], Any], classes: int | Sequence[str], buckets: int,
        repetitions: int, *, seed: int = 0, multilabel: bool = False, shared_trunk: bool = False,
        estimator: str | None = None, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        arguments.function(build, "build", _BUILD)
        multilabel = arguments.flag(multilabel, "multilabel")
        labels = Labels(classes, multilabel)
        most = min(labels.count - 1, _MOST_BUCKETS)
        expected = {"what": f"a number of buckets, fewer than the {labels.count:,} classes"}
        self._ensemble = Ensemble(
            build,
            labels,
            arguments.whole(buckets, "buckets", 2, most, **expected),
            arguments.whole(repetitions, "repetitions", 1, 9999, what="a number of repetitions"),
            arguments.whole(seed, "seed", 0, (1 << 53) - 1),
            arguments.flag(shared_trunk, "shared_trunk"),
            arguments.optional(arguments.choice, estimator, "estimator", ESTIMATORS)
            or (LOGITS if multilabel else UNBIASED),
        )
        self._path = arguments.optional(arguments.path, folder, "folder")
        self._seconds = 0.0

    @classmethod
    def load(
        cls, folder: str | Path, build: Callable[[int], Any], *, estimator: str | None = None,
        allow_missing: bool = False,
    ) -> MACH:  # fmt: skip
        """Return the MACH of a folder, with all models that are trained.

        Args:
            folder: the folder that ``fit`` or ``save`` has written.
            build: the function that the models were made with.
            estimator: as for ``MACH``.
            allow_missing: whether the others answer if repetitions are missing.

        Raises:
            ValueError: if files are damaged or do not belong together, or a repetition is missing.
        """
        settings, names = read_settings(arguments.path(folder, "folder"))
        made = cls(
            build,
            settings.integer("classes") if names is None else names,
            settings.integer("buckets"),
            settings.integer("repetitions"),
            seed=settings.integer("seed"),
            multilabel=bool(settings.integer("multilabel")),
            shared_trunk=bool(settings.integer("shared_trunk")),
            estimator=estimator,
            folder=folder,
        )
        made.allow_missing = arguments.flag(allow_missing, "allow_missing")
        made._ensemble.earlier = settings.integers(EARLIER) if EARLIER in settings else []
        made._ensemble.folder(folder).open()
        made._ensemble.read(made._ensemble.folder(folder))
        made._ensemble.ready()
        return made

    @property
    def allow_missing(self) -> bool:
        """Whether the trained repetitions answer if others are missing."""
        return self._ensemble.allow_missing

    @allow_missing.setter
    def allow_missing(self, allowed: bool) -> None:
        self._ensemble.allow_missing = arguments.flag(allowed, "allow_missing")

    @property
    def estimator(self) -> str:
        """The estimator of scores; another one needs no training."""
        return self._ensemble.estimator

    @estimator.setter
    def estimator(self, name: str) -> None:
        self._ensemble.estimate_by(arguments.choice(name, "estimator", ESTIMATORS))

    @property
    def models(self) -> dict[str, Any]:
        """The Keras models of this process, by the names of their files."""
        return self._ensemble.models

    def table(self) -> Any:
        """Return the bucket of each class in each repetition [repetitions, classes]."""
        return self._ensemble.table.copy()

    def compile(self, optimizer: Any = "rmsprop", loss: Any = None, **given: Any) -> None:
        """Set how each model is compiled; the arguments are those of ``keras.Model.compile``.

        Each model gets an optimizer and metrics of its own. Metrics see buckets, not classes.

        Args:
            optimizer: an optimizer of Keras, its name, or a function that returns a new one.
            loss: a loss of buckets and logits; cross-entropy by default. Keras's losses by name,
                such as ``"sparse_categorical_crossentropy"``, get ``from_logits=True``.
            **given: other arguments of ``keras.Model.compile``; ``metrics`` may be a function that
                returns new ones.
        """
        self._ensemble.compile({"optimizer": optimizer, "loss": loss, **given})

    def fit(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1,
        verbose: Any = "auto", callbacks: Any = None, validation_data: Any = None, *,
        class_weight: Any = None, sample_weight: Any = None, propensity: Any = None, **given: Any,
    ) -> History:  # fmt: skip
        """Train the repetitions of this worker, one model after another.

        Arguments are those of ``keras.Model.fit``; labels are numbers or names of classes. With a
        folder, ``epochs`` counts from the first epoch of each model: a model that has them is not
        trained again, and an unfinished one goes on after its last epoch.

        Args:
            x: as for ``keras.Model.fit``.
            y: labels.
            batch_size: as for ``keras.Model.fit``.
            epochs: number of epochs of each model.
            verbose: as for ``keras.Model.fit``.
            callbacks: callbacks, or a function from the name of a model to its callbacks.
            validation_data: as for ``keras.Model.fit``. Arrays and datasets also give precision and
                recall of classes: with a shared trunk after each epoch, else at the end.
            class_weight: a dict from labels to weights.
            sample_weight: as for ``keras.Model.fit``.
            propensity: as for ``evaluate``, for the metrics of ``validation_data``.
            **given: other arguments of ``keras.Model.fit``.
        """
        if self._ensemble.compiled is None:
            raise ValueError("fit needs a MACH that is compiled; call compile first")
        folder = None
        if self._path is not None:
            folder = self._ensemble.folder(self._path)
            folder.open()
        epochs = arguments.whole(epochs, "epochs", 1, what="a number of epochs")
        given |= {"batch_size": batch_size, "epochs": epochs, "verbose": verbose}
        data = {"x": x, "y": y, "sample_weight": sample_weight, "class_weight": class_weight}
        data["validation_data"] = validation_data
        begin = time.monotonic()
        self._check_propensity(propensity)
        validate = self._validation(validation_data, propensity, given)
        given["callbacks"] = callbacks
        found = fitting.fit(self._ensemble, folder, data, given, validate)
        self._seconds = (time.monotonic() - begin) / max(len(found.models), 1)
        return found

    def _validation(
        self, data: Any, propensity: Any, given: dict[str, Any]
    ) -> Callable[[], Any] | None:
        """Return a function that measures classes, for data that can be read once more."""
        if data is None or hasattr(data, "__next__"):
            return None
        x, y, *_ = data if isinstance(data, (tuple, list)) else (data, None)
        size = given.get("validation_batch_size") or given["batch_size"] or 32
        steps, ks = given.get("validation_steps"), sorted({1, min(5, self._ensemble.labels.count)})
        return lambda: self.evaluate(
            x, y, k=ks, propensity=propensity, batch_size=size, steps=steps
        )

    def _check_propensity(self, propensity: Any) -> None:
        classes = self._ensemble.labels.count
        if propensity is not None and not _are_propensities(propensity, classes):
            expected = f"an array of {classes:,} numbers above 0 and up to 1"
            raise arguments.wrong(propensity, "propensity", expected)

    def top(
        self, x: Any, k: int = 10, *, batch_size: int = 256, candidates: int | None = None
    ) -> tuple[Any, Any]:
        """Return the k best classes of each sample, and their scores.

        Args:
            x: samples, as for ``keras.Model.predict``.
            k: number of classes.
            batch_size: number of samples that the models see at once.
            candidates: number of buckets of each repetition to look into first, by TensorFlow's
                operations. Where that does not prove which classes are best, all classes are
                scored. 0 scores all. By default, a search in C++ scores all if classes are many
                (``explain`` says whether it can be used), or TensorFlow's operations look into 4
                buckets if that is less work. The result is exact with any number.

        Returns:
            Scores and labels, two arrays [samples, k], best first.
        """
        k = arguments.whole(k, "k", 1, self._ensemble.labels.count, **_NUMBER_OF_CLASSES)
        batch_size = arguments.whole(batch_size, "batch_size", 1, example="256")
        expected = {"what": "a number of buckets", "example": "4"}
        looked_into = arguments.optional(arguments.whole, candidates, "candidates", 0, **expected)
        search = self._ensemble.search()
        values = self._ensemble.values(x, batch_size)
        found = [search.top(each, k, looked_into) for each in values]
        none = np.zeros([0, k], np.float32), np.zeros([0, k], np.int32)
        scores, ids = (np.concatenate(parts) for parts in zip(none, *found, strict=True))
        return scores, self._ensemble.labels.named(ids)

    def evaluate(
        self, x: Any, y: Any = None, *, k: int | Sequence[int] = (1, 5), propensity: Any = None,
        batch_size: int = 256, steps: int | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Return precision and recall of the k best classes.

        Args:
            x: arrays, or data that gives ``(x, y)``.
            y: labels, if ``x`` is arrays.
            k: a number of classes, or several.
            propensity: for each class the probability that a true label is recorded, as from
                ``propensities``, for propensity-scored precision ``"psp@k"``.
            batch_size: number of samples that the models see at once.
            steps: number of batches to read; None for all.
        """
        check_labels(x, y)
        labels = self._ensemble.labels
        ks = arguments.items(
            [k] if arguments.is_number(k) else k, "k", "a number of classes, or several",
            lambda v, n: arguments.whole(v, n, 1, labels.count, **_NUMBER_OF_CLASSES),
        )  # fmt: skip
        self._check_propensity(propensity)
        search, totals = self._ensemble.search(), AtK(ks, propensity)
        ids = None if y is None else np.asarray(labels.ids(y))
        for part, true, *_ in batches_of(x, ids, batch_size, steps):
            true = np.asarray(labels.ids(true) if ids is None else true)
            _, found = search.top(self._ensemble.values_of(part), max(ks))
            totals.add(true if true.ndim == 2 else true[:, None], found)
        return totals.result()

    def save(self, folder: str | Path) -> None:
        """Write the trained models into a folder, for ``load``."""
        heads = self._ensemble.ready()
        if not all(each.epochs for each in heads):
            raise ValueError(
                "save writes trained models, and no epoch has ended yet: call it later"
            )
        target = self._ensemble.folder(arguments.path(folder, "folder"))
        target.open()
        for each in heads:
            target.write(each.name, each.model, each.epochs)

    def gather(self, timeout: float = 600.0) -> None:
        """Load the repetitions that other workers train, and wait until all are written.

        Args:
            timeout: number of seconds to wait.

        Raises:
            ValueError: if repetitions are missing after that time.
        """
        end = time.monotonic() + arguments.seconds(timeout, "timeout", least=0)
        if self._path is None:
            raise ValueError("gather needs a MACH with folder=..., into which all workers write")
        self._ensemble.read(self._ensemble.folder(self._path))
        while not self._ensemble.is_complete and time.monotonic() < end:
            time.sleep(0.2)
            self._ensemble.read(self._ensemble.folder(self._path))
        self._ensemble.ready()

    def add_classes(self, classes: int | Sequence[str]) -> None:
        """Add classes, which are hashed into the buckets that exist.

        Weights stay. Until training goes on with samples of a new class, its score is that of the
        classes in its buckets, so it is rarely among the best.

        Args:
            classes: how many classes to add, or their names if classes have names.
        """
        old = self._ensemble.labels
        if old.names is None:
            number = arguments.whole(classes, "classes", 1, what="how many classes to add")
            self._ensemble.grow(Labels(old.count + number, old.multilabel))
        else:
            names = arguments.items(classes, "classes", "a list of names")
            self._ensemble.grow(Labels([*old.names, *names], old.multilabel))

    def export(self, path: str | Path, k: int = 10, *, input_signature: Any = None) -> None:
        """Write a SavedModel whose endpoint ``serve`` returns the k best classes.

        Args:
            path: the folder to write.
            k: number of classes.
            input_signature: a ``tf.TensorSpec``, or a structure of them; by default the inputs of
                the models.
        """
        k = arguments.whole(k, "k", 1, self._ensemble.labels.count, **_NUMBER_OF_CLASSES)
        serving.export(self._ensemble, k, str(arguments.path(path, "path")), input_signature)

    def explain(self) -> str:
        """Return in words how classes are hashed, and what is trained."""
        ensemble, classes = self._ensemble, self._ensemble.labels.count
        buckets, repetitions = ensemble.buckets, ensemble.repetitions
        equal = classes - len(np.unique(ensemble.table.T, axis=0))
        bound = confusion_of(classes, buckets, repetitions)
        why = obstacle(classes, ensemble.trained or repetitions, ensemble.estimator)
        lines = [
            f"{classes:,} classes in {repetitions} repetitions of {buckets:,} buckets: "
            f"{classes / (buckets * repetitions):,.1f} times fewer outputs than classes",
            f"hash functions: {FAMILY}, seed {ensemble.seed}",
            f"classes that share all buckets with an earlier one: {equal:,} "
            f"(probability of any: at most {bound:.2g})",
            f"score of a class: {ensemble.estimator}",
            f"top searches {'in C++' if why is None else f'by operations of TensorFlow: {why}'}",
            f"repetitions that are trained: {ensemble.trained} of {repetitions}",
        ]
        if self._seconds:
            lines.append(f"time of a model in the last fit: {self._seconds:,.1f} s")
        return "\n".join(lines)


def _are_propensities(given: Any, classes: int) -> bool:
    array = np.asarray(given)
    return array.shape == (classes,) and bool(((array > 0) & (array <= 1)).all())
