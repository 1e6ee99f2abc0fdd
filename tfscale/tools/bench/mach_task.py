"""Contestants of ``tfscale bench mach``: MACH, full softmax and sampled softmax.

All have the same layers before the last one, the same optimizer and as many seconds of training.
MACH's repetitions share these seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CLOCKS = {"wall": time.monotonic, "processor": time.process_time}
ESTIMATORS = ("unbiased", "logits")
RATE = 0.002
_TEST, _TEST_SEED, _PART = 4096, 10**6, 256
_FLOATS = 4  # a weight, its gradient, and Adam's two numbers
_SERVED = {1: 50, 64: 10}  # number of calls by the number of samples of a call


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a contestant.

    Attributes:
        head: parameters of the last layers.
        megabytes: memory of a last layer that is trained, with gradient and optimizer.
        steps: steps of training, all repetitions together.
        top1: share of words that are repaired, in %.
        top5: share of words that are among the five best, in %.
        served: queries of the exported model per second of the clock, by samples of a call.
    """

    name: str
    head: int
    megabytes: float
    steps: int
    top1: float
    top5: float
    served: dict[str, float] = dataclasses.field(default_factory=dict)


class Task:
    """A task with one set of options.

    Args:
        pairs: inputs and their classes, such as ``spelling.Words``.
        options: options of the command line.
    """

    def __init__(self, pairs: Any, options: argparse.Namespace) -> None:
        self.pairs, self.options, self.classes = pairs, options, pairs.classes
        self._clock = CLOCKS[options.clock]
        self._test = pairs.draw(np.random.default_rng(_TEST_SEED), _TEST)
        self._trunk = pairs.trunk(options.width, options.table)

    def run(self, name: str) -> list[Result]:
        """Train a contestant, and judge it; MACH by two estimators, on the same models."""
        import keras

        keras.utils.set_random_seed(1)
        policy = "float32" if self.options.precision == "float32" else "mixed_bfloat16"
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            return self._run(name)
        finally:
            keras.config.set_dtype_policy(before)

    def _run(self, name: str) -> list[Result]:
        if name in ("mach", "shared"):
            return self._mach(name, name == "shared")
        return [self._softmax(name, name == "sampled")]

    def _mach(self, name: str, shared: bool) -> list[Result]:
        from tfscale.training.extreme import MACH

        buckets, repetitions = self.options.buckets, self.options.repetitions
        made = MACH(self._build, self.classes, buckets, repetitions, shared_trunk=shared)
        made.compile(_optimizer())
        trainings = 1 if shared else repetitions
        steps = self._train(made.fit, trainings)
        outputs = buckets * repetitions
        results = []
        for made.estimator in ESTIMATORS:
            result = self._result(
                f"{name}, {made.estimator}", outputs, outputs // trainings, steps,
                lambda x: made.top(x, 5, batch_size=_PART)[1],
            )  # fmt: skip
            results.append(result)
        if self.options.serve:
            results[-1] = dataclasses.replace(results[-1], served=self._served(made))
        return results

    def _served(self, made: Any) -> dict[str, float]:
        """Return how many queries a second the exported model answers."""
        import tensorflow as tf

        x, found = self._test[0], {}
        with tempfile.TemporaryDirectory(prefix="tfscale-mach-") as folder:
            made.export(folder, k=10)
            loaded = tf.saved_model.load(folder)
        for samples, calls in _SERVED.items():
            parts = [tf.constant(x[i * samples : (i + 1) * samples]) for i in range(calls)]
            loaded.serve(parts[0])
            begin = self._clock()
            for part in parts:
                loaded.serve(part)["labels"].numpy()
            found[str(samples)] = calls * samples / (self._clock() - begin)
        return found

    def _build(self, outputs: int) -> Any:
        import keras

        inputs, hidden = self._trunk()
        return keras.Model(inputs, keras.layers.Dense(outputs)(hidden))

    def _softmax(self, name: str, sampled: bool) -> Result:
        import keras

        model = self._build(self.classes)
        if sampled:
            model = _sampled(model, self.options.samples)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(_optimizer(), None if sampled else loss)
        steps = self._train(model.fit, 1)

        def search(x: Any) -> Any:
            parts = (model(x[i : i + _PART], training=False) for i in range(0, len(x), _PART))
            return np.concatenate([keras.ops.top_k(part, 5)[1] for part in parts])

        return self._result(name, self.classes, self.classes, steps, search)

    def _train(self, fit: Any, trainings: int) -> int:
        import tensorflow as tf

        columns = self._test[0].shape[1]
        spec = tf.TensorSpec([None, columns], tf.int32), tf.TensorSpec([None], tf.int32)
        data = tf.data.Dataset.from_generator(self._batches, output_signature=spec).prefetch(4)
        until = _until(self.options.seconds / trainings, self._clock)
        fit(data, steps_per_epoch=10**6, verbose=0, shuffle=False, callbacks=[until])
        return int(until.steps)

    def _batches(self) -> Any:
        rng = np.random.default_rng(1)
        while True:
            yield self.pairs.draw(rng, self.options.batch)

    def _result(
        self, name: str, outputs: int, at_once: int, steps: int, search: Callable[[Any], Any]
    ) -> Result:
        x, true = self._test
        hits = search(x) == true[:, None]
        weights = self.options.width + 1
        memory = at_once * weights * _FLOATS * 4 / 1e6
        top1, top5 = (100 * float(hits[:, :k].any(1).mean()) for k in (1, 5))
        return Result(name, outputs * weights, memory, steps, top1, top5)


def _optimizer() -> Any:
    import keras

    return keras.optimizers.Adam(RATE)


def _until(seconds: float, clock: Callable[[], float]) -> Any:
    """Return a callback that ends each ``fit`` after a time, counted from its second step."""
    import keras

    class Until(keras.callbacks.Callback):
        steps, _end = 0, 0.0

        def on_train_begin(self, logs: Any = None) -> None:
            self._end = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            self._end = self._end or clock() + seconds
            self.model.stop_training = clock() > self._end

    return Until()


def _sampled(model: Any, samples: int) -> Any:
    """Return a model that trains the last layer of another one on sampled classes.

    A step reads and writes only the rows of its classes: Adam's numbers of other rows stay. Keras's
    Adam would change all rows in each step, as a full softmax does.
    """
    import keras
    import tensorflow as tf

    classes, trained = model.layers[-1].units, model.layers[-1].compute_dtype
    hidden = keras.Model(model.inputs, model.layers[-1].input)
    width = hidden.output_shape[-1]
    deviation = (2 / (width + classes)) ** 0.5  # as that of keras.layers.Dense
    weights = tf.random.truncated_normal([classes, width], stddev=deviation)
    table = tf.Variable(tf.pad(weights, [[0, 0], [0, 1]]))  # the last column is the bias
    moments = [tf.Variable(tf.zeros_like(table)) for _ in range(2)]

    def with_one(x: Any) -> Any:
        return tf.pad(tf.cast(hidden(x), trained), [[0, 0], [0, 1]], constant_values=1)

    class Sampled(keras.Model):
        def call(self, x: Any, training: bool = False) -> Any:
            return tf.matmul(with_one(x), tf.cast(table, trained), transpose_b=True)

        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            drawn = tf.random.uniform([samples], maxval=classes, dtype=y.dtype)
            rows, places = tf.unique(tf.concat([y, drawn], 0))
            weights = hidden.trainable_variables
            with tf.GradientTape() as tape:
                some = tf.gather(table, rows)
                tape.watch(some)
                loss = _sampled_loss(with_one(x), tf.cast(some, trained), y, drawn, places)
            *gradients, of_rows = tape.gradient(loss, [*weights, some])
            self.optimizer.apply(gradients, weights)
            step = tf.cast(self.optimizer.iterations, tf.float32)
            _adam_of_rows(table, moments, rows, some, tf.convert_to_tensor(of_rows), step)
            return {"loss": loss}

    made = Sampled()
    made.parts = [hidden]
    return made


def _sampled_loss(hidden: Any, some: Any, y: Any, drawn: Any, places: Any) -> Any:
    """Return the loss of labels among the drawn classes; those equal to the label do not count.

    All classes are drawn with one probability, so no logit needs a correction.
    """
    import tensorflow as tf

    true = tf.gather(some, places[: tf.size(y)])
    others = tf.matmul(hidden, tf.gather(some, places[tf.size(y) :]), transpose_b=True)
    others = tf.where(y[:, None] == drawn[None], -1e9, tf.cast(others, tf.float32))
    logit = tf.reduce_sum(tf.cast(hidden * true, tf.float32), 1)
    both = tf.concat([logit[:, None], others], 1)
    return tf.reduce_mean(tf.reduce_logsumexp(both, 1) - logit)


def _adam_of_rows(
    table: Any, moments: Sequence[Any], rows: Any, old: Any, gradient: Any, step: Any
) -> None:
    """Make a step of Adam for some rows of a variable."""
    import tensorflow as tf

    first = 0.9 * tf.gather(moments[0], rows) + 0.1 * gradient
    second = 0.999 * tf.gather(moments[1], rows) + 0.001 * gradient**2
    rate = RATE * tf.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    new = old - rate * first / (tf.sqrt(second) + 1e-7)
    for variable, value in ((moments[0], first), (moments[1], second), (table, new)):
        variable.scatter_update(tf.IndexedSlices(value, rows))
