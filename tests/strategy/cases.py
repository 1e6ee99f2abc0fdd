"""The table behind "k replicas = one device". To add a case, add a line.

Each case is built and trained on one device without a strategy, and on several replicas. All its
weights and optimizer variables, and all that its training reports, must be the same within
`tolerance`; a larger one than usual says why, with what was measured. `models.py` has the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras import optimizers

from tests.strategy import models as m, strangers as st
from tests.strategy.models import ADAM, BATCH, ROWS, SGD, STEPS, classifier, fit, reader
from tfscale.optimizers import LAMB, LARS, AdaHessian
from tfscale.quantize import Prune

LAYOUTS = ("1x1", "1x2", "1x4", "2x1", "2x2")  # workers x devices
WORKERS = ("2x1", "2x2")


@dataclass(frozen=True)
class Case:
    """One way to train; see the parts in ``models.py``."""

    name: str
    build: Callable[[], keras.Model]
    train: Callable[[keras.Model], dict[str, Any]]
    tolerance: float = 1e-6
    why: str = ""
    layouts: tuple[str, ...] = LAYOUTS

    def may(self, name: str) -> float:
        """Return by how much a variable or a number may be off."""
        return self.tolerance


Shard = tf.data.experimental.AutoShardPolicy
momentum = partial(SGD, momentum=0.9)
# Far from where rounding is amplified by a curvature near zero.
curved = partial(AdaHessian, 0.05, epsilon=0.1)
plain = classifier(momentum)


def loss(reduction):
    return partial(m.cross_entropy, reduction=reduction)


def ignoring():
    return m.cross_entropy(ignore_class=1)


def even():
    return m.numbers(STEPS * BATCH)


def one_left():
    """A last batch of one row, so that other replicas have none."""
    return m.numbers((STEPS - 1) * BATCH + 1)


HALVES = (
    "Keras rounds a replica's gradient to float16, 2**-11 of it, before tfscale sees it: "
    "measured 2.7e-4 after 20 steps on two replicas"
)
BRAIN = (
    "the same with 2**-8: measured 2.5e-3 on two replicas; one device itself is off by 1.9e-3 "
    "when the rows of a batch change places"
)

OPTIMIZERS = [
    Case("sgd_even", plain, fit(even)),
    Case("sgd", plain, fit()),
    Case("adam", classifier(ADAM), fit()),
    Case("adamw", classifier(partial(optimizers.AdamW, 0.01, weight_decay=0.1)), fit()),
    Case("lamb", classifier(partial(optimizers.Lamb, 0.01)), fit()),
    Case("lamb_of_tfscale", classifier(partial(LAMB, 0.01, weight_decay=0.1)), fit()),
    Case("lars", classifier(partial(LARS, 0.5, trust_coefficient=0.02, weight_decay=0.1)), fit()),
    Case("adahessian", classifier(curved), fit()),
    Case("adahessian_each_third", classifier(partial(curved, update_each=3, samples=2)), fit()),
    Case(
        "adahessian_accumulate",
        classifier(partial(curved, update_each=2, gradient_accumulation_steps=2)),
        fit(),
    ),
    Case("adahessian_batch_norm", classifier(curved, m.batch_norm), fit()),
    Case(
        "adahessian_curvature",
        classifier(partial(curved, samples=2)),
        m.fit_and_tell_curvature,
    ),
]

BATCHES = [  # batches and replicas
    Case("batch_of_15", plain, fit(batch_size=15)),
    Case("batch_of_1", plain, fit(partial(m.numbers, STEPS), batch_size=1)),
    Case("short_first_batch", plain, fit(m.short_first)),
    Case("last_batch_of_1", plain, fit(one_left)),
    Case("last_batch_of_1_adam", classifier(ADAM), fit(one_left)),
]

CLIPPING = [
    Case("clipnorm", classifier(partial(momentum, clipnorm=0.05)), fit()),
    Case("global_clipnorm", classifier(partial(momentum, global_clipnorm=0.05)), fit()),
    Case("clipvalue", classifier(partial(momentum, clipvalue=0.01)), fit()),
    Case("clipnorm_adam", classifier(partial(ADAM, clipnorm=0.05)), fit()),
]

AVERAGES = [  # accumulation and averages
    Case("accumulate_2", classifier(partial(momentum, gradient_accumulation_steps=2)), fit()),
    Case("accumulate_4", classifier(partial(ADAM, gradient_accumulation_steps=4)), fit()),
    Case(
        "accumulate_and_clip",
        classifier(partial(momentum, gradient_accumulation_steps=2, global_clipnorm=0.05)),
        fit(),
    ),
    Case("ema", classifier(partial(SGD, use_ema=True, ema_momentum=0.9)), fit()),
    Case(
        "ema_overwrite",
        classifier(partial(SGD, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3)),
        fit(),
    ),
]

LOSSES = [
    Case("masked", reader(momentum, m.masked_time_distributed), fit(m.sentences)),
    Case("masked_lstm", reader(momentum, m.masked_lstm), fit(m.sentences)),
    Case(
        "masked_with_weights",
        reader(momentum, m.masked_time_distributed),
        fit(m.sentences, sample_weight=m.weights(ROWS, m.LENGTH)),
    ),
    Case(
        "masked_sum",
        reader(partial(SGD, learning_rate=0.001), m.masked_time_distributed, loss=loss("sum")),
        fit(m.sentences),
    ),
    Case("masked_class", reader(momentum, m.words, loss=ignoring), fit(m.sentences)),
    Case(
        "masked_class_and_words",
        reader(momentum, m.masked, loss=ignoring),
        fit(m.sentences, sample_weight=m.weights(ROWS, m.LENGTH)),
    ),
    Case("sample_weight", plain, fit(sample_weight=m.weights())),
    Case("class_weight", plain, fit(class_weight={0: 0.5, 1: 1.0, 2: 3.0})),
    Case(
        "weighted_metrics",
        classifier(momentum, weighted_metrics=["accuracy"]),
        fit(sample_weight=m.weights()),
    ),
    Case("mean", classifier(momentum, loss=loss("mean")), fit()),
    Case("sum", classifier(partial(SGD, learning_rate=0.005), loss=loss("sum")), fit()),
    Case("one_number", classifier(momentum, loss=lambda: m.mean_of_a_batch), fit()),
    Case("function_of_means", classifier(momentum, loss=lambda: m.function_of_means), fit()),
    Case("none", classifier(partial(SGD, learning_rate=0.005), loss=loss("none")), fit()),
    Case(
        "mean_with_sample_weight",
        classifier(momentum, loss=loss("mean_with_sample_weight")),
        fit(sample_weight=m.weights()),
    ),
    Case("l2", classifier(momentum, partial(m.dense, kernel_regularizer="l2")), fit()),
    Case("activity", classifier(momentum, partial(m.dense, activity_regularizer="l2")), fit()),
    Case("add_loss", classifier(momentum, lambda x: m.Penalty()(m.dense(x))), fit()),
    Case("several_outputs", m.several_outputs, fit(m.two_targets)),
]

OWN_STEPS = [
    Case("own_step", m.own_step, fit()),
    Case("own_step_masked", m.masked_step, fit(m.sentences)),
    Case("own_step_one_hot", m.one_hot_step, fit()),
    Case("own_step_clips", m.own_step_that(m.Clipped, momentum), fit(m.topics)),
    Case(
        "own_step_clips_and_accumulates",
        m.own_step_that(m.Clipped, partial(ADAM, gradient_accumulation_steps=2)),
        fit(m.topics),
    ),
    Case("own_step_decays", m.own_step_that(m.AddsWeights), fit(m.topics)),
    Case("own_step_moves_weights", m.climber, fit()),
    Case("own_step_builds_a_layer", m.built_late(m.BuiltInStep, ADAM), fit()),
    Case(
        "own_step_builds_a_layer_and_accumulates",
        m.built_late(m.BuiltInStep, partial(ADAM, gradient_accumulation_steps=2)),
        fit(),
    ),
    Case("built_in_training", m.built_late(m.BuiltInTraining, momentum), fit()),
    Case("two_optimizers", m.adversaries, fit(m.noise_and_real)),
]

LAYERS = [  # layers with state, sparse gradients, constraints
    Case("batch_norm", classifier(momentum, m.batch_norm), fit()),
    Case("batch_norm_adam", classifier(ADAM, m.batch_norm), fit()),
    Case("embedding", reader(momentum, m.embedded), fit(m.topics)),
    Case("embedding_adam", reader(ADAM, m.embedded), fit(m.topics)),
    Case(
        "embedding_adam_distinct",
        reader(ADAM, partial(m.embedded, words=ROWS * m.LENGTH + 1)),
        fit(m.distinct),
    ),
    Case(
        "embedding_large",
        reader(momentum, partial(m.embedded, words=1000)),
        fit(partial(m.topics, words=1000)),
    ),
    Case(
        "constraint",
        classifier(momentum, partial(m.dense, kernel_constraint=keras.constraints.MaxNorm(0.5))),
        fit(),
    ),
]

FEW_BITS = [
    Case("quantized", m.few_bits(plain), fit()),
    Case("pruned", plain, fit(callbacks=[Prune(0.5, end=15, every=4)])),
    Case("pruned_channels", plain, fit(callbacks=[Prune(0.5, end=15, every=4, channels=True)])),
]

PRECISION = [
    Case("float16", m.under("mixed_float16", plain), fit(), 1e-3, HALVES),
    Case(
        "float16_overflow",
        m.under("mixed_float16", plain),
        fit(m.overflowing),
        1e-3,
        HALVES,
    ),
    Case("bfloat16", m.under("mixed_bfloat16", plain), fit(), 1e-2, BRAIN),
]

RATES = [
    Case(
        "schedule",
        classifier(lambda: momentum(learning_rate=optimizers.schedules.CosineDecay(0.1, 20))),
        fit(),
    ),
    Case("callback", plain, fit(callbacks=[m.EachBatchSlower()])),
]

RUNNING = [
    Case("steps_per_execution", classifier(momentum, steps_per_execution=4), fit()),
    Case("run_eagerly", classifier(momentum, run_eagerly=True), fit()),
    Case("run_eagerly_clipped", classifier(partial(ADAM, clipnorm=0.05), run_eagerly=True), fit()),
    Case(
        "run_eagerly_masked",
        reader(momentum, m.masked_time_distributed, run_eagerly=True),
        fit(m.sentences),
    ),
    Case("jit_auto", classifier(momentum, jit_compile="auto"), fit()),
    Case("jit_off", classifier(momentum, jit_compile=False), fit()),
    Case("judge", plain, m.fit_and_judge),
    Case("judge_own_metrics", m.own_metrics, m.fit_and_judge),
    Case("judge_dataset", plain, m.fit_and_judge_a_dataset),
    Case("on_batches", plain, m.on_batches),
    Case("predict_on_batch", plain, m.fit_and_predict_on_batch),
]

DATA = [
    Case("dataset", plain, fit(m.dataset)),
    Case("dataset_shuffled", plain, fit(m.shuffled)),
    Case("repeated", plain, fit(lambda: m.dataset().repeat(), steps_per_epoch=STEPS)),
    Case("generator", plain, fit(m.generator, steps_per_epoch=STEPS)),
    Case("py_dataset", plain, fit(m.Batches)),
    Case("py_dataset_shuffled", plain, fit(m.Batches, shuffle=True)),
    Case("py_dataset_of_threads", plain, fit(partial(m.Batches, workers=2))),
    Case("shard_data", plain, fit(partial(m.dataset, policy=Shard.DATA)), layouts=WORKERS),
    Case("shard_off", plain, fit(m.own_shards, steps_per_epoch=STEPS), layouts=WORKERS),
    Case("shard_file", plain, m.fit_files, layouts=WORKERS),
]

STRANGERS = [  # kinds of programs that keras.io shows
    Case("mean_beside_a_loss_object", st.beside_a_loss_object, fit(st.regression)),
    Case("global_loss_object", st.global_loss_object, fit(st.words)),
    Case("masked_mean_of_ones_own", st.masked_mean, fit(st.regression)),
    Case("adds_a_sum", st.adds_a_sum, fit(st.regression)),
    Case("distiller", st.distiller, fit(st.topics)),
    Case("sparse_input_adam", st.of_sparse_rows, fit(st.sparse_rows)),
    Case("compute_metrics", st.logs_more, fit(st.regression)),
]

PARTS = (
    OPTIMIZERS,
    BATCHES,
    CLIPPING,
    AVERAGES,
    LOSSES,
    OWN_STEPS,
    LAYERS,
    FEW_BITS,
    PRECISION,
    RATES,
    RUNNING,
    DATA,
    STRANGERS,
)
CASES = [case for part in PARTS for case in part]
BY_NAME = {case.name: case for case in CASES}


def rows():
    """Layout and name, for all layouts of all cases."""
    return [(layout, case.name) for layout in LAYOUTS for case in CASES if layout in case.layouts]


ONCE_WRONG = [("1x1", "float16_overflow"), ("1x1", "dataset_shuffled")]


# Another case of their part covers these, or they train with shards, shares or rounded weights.
LIKE_ANOTHER = ("sgd_even", "adahessian", "adahessian_each_third", "batch_of_15", "clipnorm_adam")
LIKE_ANOTHER += ("last_batch_of_1_adam", "accumulate_2", "ema", "masked_class", "sum", "own_step")
LIKE_ANOTHER += ("own_step_builds_a_layer", "batch_norm_adam", "embedding_adam", "pruned")
LIKE_ANOTHER += ("run_eagerly_clipped", "judge", "py_dataset", "dataset")


def aspects(row):
    """Return the aspects that a sample must have: nearly each case, and each part in most layouts.

    One replica shows least, and 2x2 has four as well as 1x4.
    """
    layout, name = row
    (part,) = [i for i, part in enumerate(PARTS) if BY_NAME[name] in part]
    case = [] if name in LIKE_ANOTHER else [name]
    place = layout if layout in ("1x1", "1x4") else (part, layout)
    return [*case, place, *([row] if row in ONCE_WRONG else [])]


# Processor time of a layout against the others'. One replica is cheapest, and shows least.
COSTS = {"1x2": 1, "2x1": 2, "1x1": 3, "1x4": 4, "2x2": 5}


def cost(row):
    """Return how late a sample should take a row that adds no more than another."""
    return COSTS[row[0]]
