"""The hash tables of a MACH and its models, and the values that they give to buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.bridge.data import batches_of
from tfscale.training.extreme.estimators import values_of
from tfscale.training.extreme.files import Folder
from tfscale.training.extreme.hashing import FAMILY, buckets_of
from tfscale.training.extreme.heads import Heads
from tfscale.training.extreme.labels import Labels
from tfscale.training.extreme.search import Search
from tfscale.training.extreme.tracing import Traced


class Ensemble:
    """Models of the repetitions, made when they are needed.

    Args:
        build: the user's function from a number of buckets to a model.
        labels: the classes.
        buckets: number of buckets.
        repetitions: number of repetitions.
        seed: seed of the hash functions.
        shared_trunk: whether one model predicts the buckets of all repetitions.
        estimator: one of ``ESTIMATORS``.

    Attributes:
        allow_missing: whether the trained repetitions answer if others are missing.
        compiled: arguments of ``compile``; None before.
        earlier: earlier numbers of classes, before others were added.
        strategy: the strategy in whose scope the ensemble was made.
    """

    def __init__(
        self, build: Callable[[int], Any], labels: Labels, buckets: int, repetitions: int,
        seed: int, shared_trunk: bool, estimator: str,
    ) -> None:  # fmt: skip
        self.build, self.buckets, self.repetitions = build, buckets, repetitions
        self.seed, self.shared_trunk, self.estimator = seed, shared_trunk, estimator
        self.strategy = tf.distribute.get_strategy()
        self.compiled: dict[str, Any] | None = None
        self.allow_missing = False
        self.earlier: list[int] = []
        self._heads: dict[str, Heads] = {}
        self._trained: set[str] = set()
        self.hash(labels)

    def hash(self, labels: Labels) -> None:
        """Take these classes, and hash them."""
        self.labels = labels
        of = self.buckets, self.seed
        self.table = np.stack([buckets_of(labels.keys, *of, r) for r in range(self.repetitions)])
        self._answering: tuple[list[str], Search, Any] | None = None

    def grow(self, labels: Labels) -> None:
        """Take these classes, which begin with those of before."""
        self.earlier.append(self.labels.count)
        self.hash(labels)

    def estimate_by(self, estimator: str) -> None:
        """Take another estimator."""
        self.estimator, self._answering = estimator, None

    # ------------------------------------------------------------------ models

    def shares(self, index: int = 0, count: int = 1) -> list[list[int]]:
        """Return for each model of one of several workers the repetitions that it predicts."""
        if self.shared_trunk:
            return [list(range(self.repetitions))]
        return [[repetition] for repetition in range(index, self.repetitions, count)]

    def heads_of(self, share: Sequence[int]) -> Heads:
        """Return the model of some repetitions, which is made at the first call."""
        for heads in self._heads.values():
            if heads.repetitions == share:
                return heads
        with self.strategy.scope():
            made = Heads(self.build, self.buckets, share, self.shared_trunk)
        if any(made.built is other.built for other in self._heads.values()):
            raise ValueError(
                "build returned one model twice; make a new model in each call, since each "
                "repetition has weights of its own"
            )
        self._heads[made.name] = made
        self._compile(made)
        return made

    def compile(self, given: dict[str, Any]) -> None:
        """Compile all models, also those that are made later."""
        self.compiled = given
        for heads in self._heads.values():
            self._compile(heads)

    def _compile(self, heads: Heads) -> None:
        if self.compiled is not None:
            with self.strategy.scope():
                heads.compile(self.buckets, self.labels.multilabel, self.compiled)

    def note(self, heads: Heads) -> None:
        """Note that a model is trained."""
        self._trained.add(heads.name)

    def is_trained(self, heads: Heads) -> bool:
        """Return whether a model is trained."""
        return heads.name in self._trained

    def ready(self) -> list[Heads]:
        """Return the trained models, in the order of repetitions.

        Raises:
            ValueError: if a repetition is missing, unless missing ones are allowed.
        """
        heads = [self._heads[name] for name in sorted(self._trained)]
        there = {repetition for each in heads for repetition in each.repetitions}
        missing = [each for each in range(self.repetitions) if each not in there]
        shown = ", ".join(map(str, missing))
        if missing and not (heads and self.allow_missing):
            raise ValueError(
                f"repetitions {shown} of {self.repetitions} are missing. Call "
                "fit; or gather, if other workers train them; or set allow_missing=True, to get "
                f"answers from the {self.repetitions - len(missing)} that are trained"
            )
        return heads

    @property
    def trained(self) -> int:
        """Number of repetitions that are trained."""
        return sum(len(self._heads[name].repetitions) for name in self._trained)

    @property
    def is_complete(self) -> bool:
        """Whether all repetitions are trained."""
        return self.trained == self.repetitions

    @property
    def models(self) -> dict[str, Any]:
        """The Keras models by their names."""
        return {name: heads.model for name, heads in self._heads.items()}

    # ------------------------------------------------------------------ files

    def folder(self, path: Any) -> Folder:
        """Return a folder for this ensemble's files."""
        settings = {
            "format": 1,
            "hash": FAMILY,
            "seed": self.seed,
            "classes": self.labels.count,
            "buckets": self.buckets,
            "repetitions": self.repetitions,
            "multilabel": int(self.labels.multilabel),
            "shared_trunk": int(self.shared_trunk),
        }
        return Folder(path, settings, self.labels.names, self.earlier)

    def read(self, folder: Folder) -> None:
        """Load all models that are not trained here, and that a folder has."""
        for share in self.shares():
            name = Heads.name_of(share, self.shared_trunk)
            if name not in self._trained and (epochs := folder.epochs(name)):
                heads = self.heads_of(share)
                folder.read(name, heads.model)
                heads.epochs = epochs
                self.note(heads)

    # ------------------------------------------------------------------ values

    def search(self) -> Search:
        """Return the search among the classes, over the trained repetitions."""
        return self._answers()[1]

    def values_of(self, x: Any) -> tf.Tensor:
        """Return the values of buckets for one batch [repetitions, samples, buckets]."""
        return self._answers()[2](x)

    def _answers(self) -> tuple[list[str], Search, Any]:
        """Return the search over the trained repetitions, and the function of their values."""
        ready = self.ready()
        names = [heads.name for heads in ready]
        if self._answering is None or self._answering[0] != names:
            used = [repetition for heads in ready for repetition in heads.repetitions]
            search = Search(self.table[used], self.buckets, self.estimator)

            def values(x: Any) -> tf.Tensor:
                logits = tf.concat([heads.logits(x) for heads in ready], 0)
                return values_of(logits, self.estimator, self.labels.multilabel)

            self._answering = names, search, Traced(values)
        return self._answering

    def values(self, x: Any, batch_size: int) -> Iterator[tf.Tensor]:
        """Yield the values of buckets, batch by batch."""
        if isinstance(x, (tf.Tensor, np.ndarray)):
            for begin in range(0, len(x), batch_size):
                yield self.values_of(tf.convert_to_tensor(x[begin : begin + batch_size]))
            return
        for batch in batches_of(x, batch_size=batch_size):
            yield self.values_of(keras.utils.unpack_x_y_sample_weight(batch)[0])
