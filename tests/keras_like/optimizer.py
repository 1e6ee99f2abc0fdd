"""Optimizers in a scope, without a model: each replica has the gradients of its rows."""

from __future__ import annotations

import itertools
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers

from tests.keras_like.scenes import batches, numbers, of_all, scenes
from tfscale.bridge.objects import innermost

ROWS, STEPS = 6, 7
SHAPES = {"kernel": (3, 4), "bias": (4,), "scale": (2, 3)}


class Shrunk(keras.constraints.Constraint):
    """Keeps numbers within a box."""

    def __call__(self, w):
        return keras.ops.clip(w, -0.6, 0.6)


def make_variables():
    return [
        keras.Variable(0.5 * numbers(i, *shape), name=name)
        for i, (name, shape) in enumerate(SHAPES.items())
    ]


def rows_of_gradients(steps=STEPS, rows=ROWS):
    """Return each variable's gradient of each row of each step; no sum of them is near zero."""
    drawn = [numbers(10 + i, steps * rows, *shape) for i, shape in enumerate(SHAPES.values())]
    offsets = [numbers(20 + i, *shape) for i, shape in enumerate(SHAPES.values())]
    return [0.1 * d + np.sign(o) * (0.2 + np.abs(o)) for d, o in zip(drawn, offsets, strict=True)]


def train(strategy, make, graph=True, gradients=rows_of_gradients, prepare=None, use=None):
    """Return an optimizer's state after some steps, and after every other of these.

    Args:
        strategy: in whose scope the optimizer is made.
        make: makes it.
        graph: whether a step is a tf.function.
        gradients: makes those of the rows.
        prepare: is called with the optimizer and the variables before the first step.
        use: applies gradients, otherwise than by ``apply``.
    """
    with strategy.scope():
        variables, optimizer = make_variables(), make()
        if prepare is not None:
            prepare(optimizer, variables)
        optimizer.build(variables)

    def step(*rows):
        summed = [tf.reduce_sum(each, 0) for each in rows]
        if use is None:
            optimizer.apply(summed, variables)
        else:
            use(optimizer, summed, variables)

    run, seen = tf.function(step) if graph else step, {}
    for number, rows in enumerate(batches(strategy, *gradients(), size=ROWS)):
        strategy.run(run, args=rows)
        if number % 2:
            seen |= {f"{v.name} at {number}": of_all(strategy, v) for v in variables}
    optimizer.finalize_variable_values(variables)
    seen |= {f"{v.name} at the end": of_all(strategy, v) for v in variables}
    state = optimizer.variables
    return seen | {f"state {i} {v.name}": v.numpy() for i, v in enumerate(state)}


def in_steps(strategy, make):
    """Variables, their optimizer, and a step for each replica, for scenes that look in between."""
    with strategy.scope():
        variables, optimizer = make_variables(), make()
        optimizer.build(variables)

    @tf.function
    def step(*rows):
        optimizer.apply([tf.reduce_sum(each, 0) for each in rows], variables)

    return variables, optimizer, step


EVERY = {
    "SGD": partial(optimizers.SGD, 0.05),
    "momentum": partial(optimizers.SGD, 0.05, momentum=0.9),
    "nesterov": partial(optimizers.SGD, 0.05, momentum=0.9, nesterov=True),
    "Adam": partial(optimizers.Adam, 0.05),
    "amsgrad": partial(optimizers.Adam, 0.05, amsgrad=True),
    "AdamW": partial(optimizers.AdamW, 0.05, weight_decay=0.1),
    "Adagrad": partial(optimizers.Adagrad, 0.05),
    "Adadelta": partial(optimizers.Adadelta, 0.5),
    "Adamax": partial(optimizers.Adamax, 0.05),
    "Adafactor": partial(optimizers.Adafactor, 0.05),
    "Ftrl": partial(optimizers.Ftrl, 0.05),
    "Lamb": partial(optimizers.Lamb, 0.05),
    "Lion": partial(optimizers.Lion, 0.05),
    "Muon": partial(optimizers.Muon, 0.05),
    "Nadam": partial(optimizers.Nadam, 0.05),
    "RMSprop": partial(optimizers.RMSprop, 0.05, momentum=0.5, centered=True),
}
SETTINGS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipvalue": {"clipvalue": 0.7},
    "clipnorm": {"clipnorm": 0.8},
    "global_clipnorm": {"global_clipnorm": 0.8},
    "accumulate": {"gradient_accumulation_steps": 2},
    "accumulate and clip": {"gradient_accumulation_steps": 3, "clipnorm": 0.8},
    "loss_scale": {"loss_scale_factor": 8.0},
    "average": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 2},
    "schedule": {"learning_rate": optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)},
}


def with_settings(make, **settings):
    """Settings come behind those of the table."""
    return make.func(
        *(() if "learning_rate" in settings else make.args), **make.keywords | settings
    )


def averages(momentum, frequency, accumulate, make=EVERY["momentum"]):
    return partial(
        make,
        use_ema=True,
        ema_momentum=momentum,
        ema_overwrite_frequency=frequency,
        gradient_accumulation_steps=accumulate,
    )


# ---- what is more than settings


def decay_excludes(strategy, by):
    def prepare(optimizer, variables):
        given = {"var_names": ["bias", "sca"]} if by == "names" else {"var_list": variables[1:]}
        optimizer.exclude_from_weight_decay(**given)

    return train(strategy, EVERY["AdamW"], prepare=prepare)


def constraints_hold(strategy, graph):
    def prepare(optimizer, variables):
        for variable in variables:
            variable.constraint = Shrunk()

    seen = train(strategy, EVERY["momentum"], graph, prepare=prepare)
    ends = [np.abs(value).max() for name, value in seen.items() if name.endswith("the end")]
    assert max(ends) <= np.float32(0.6)
    return seen


def some_have_no_gradient(strategy, graph):
    def use(optimizer, gradients, variables):
        optimizer.apply([gradients[0], None, gradients[2]], variables)

    return train(strategy, EVERY["Adam"], graph, use=use)


def pairs_are_applied(strategy, graph):
    def use(optimizer, gradients, variables):
        optimizer.apply_gradients(zip(gradients, variables))

    return train(strategy, EVERY["Adam"], graph, use=use)


def rates_are_set_between_steps(strategy):
    """Set rates as a program does that looks at the steps, outside of replicas."""
    variables, optimizer, step = in_steps(strategy, EVERY["momentum"])
    seen = {}
    for number, rows in enumerate(batches(strategy, *rows_of_gradients(), size=ROWS)):
        optimizer.learning_rate = 0.1 / (1 + number)
        strategy.run(step, args=rows)
        seen[f"rate {number}"] = optimizer.learning_rate.numpy()
        seen[f"iterations {number}"] = optimizer.iterations.numpy()
    return seen | {v.name: of_all(strategy, v) for v in variables}


def rows_of_tables(strategy, make, graph):
    """Sparse gradients; on a replica a word comes once."""
    with strategy.scope():
        table, optimizer = keras.Variable(numbers(1, 9, 2), name="table"), make()
        optimizer.build([table])

    def step(words, values):
        shape = tf.constant([9, 2])
        optimizer.apply([tf.IndexedSlices(values, words, shape)], [table])

    words = np.stack([np.random.default_rng(i).permutation(9)[:4] for i in range(STEPS)])
    run = tf.function(step) if graph else step
    for rows in batches(strategy, words.reshape(-1), 1 + numbers(2, STEPS * 4, 2) ** 2, size=4):
        strategy.run(run, args=rows)
    return {"table": of_all(strategy, table)} | {
        f"state {i}": v.numpy() for i, v in enumerate(optimizer.variables)
    }


def with_an_overflow():
    """Return gradients that overflow in the last row of the third step, on one replica alone."""
    rows = rows_of_gradients()
    rows[0][3 * ROWS - 1, 0, 0] = np.inf
    return rows


def scaled(inner, **settings):
    return optimizers.LossScaleOptimizer(inner(), initial_scale=16.0, **settings)


def scales_of_losses(strategy, inner, gradients, graph):
    """A step in which one replica overflows is none on all of them; the scale goes up and down."""

    def use(optimizer, given, variables):
        scale = optimizer.scale_loss(tf.constant(1.0))
        optimizer.apply([g * scale for g in given], variables)

    make = partial(scaled, inner, dynamic_growth_steps=2)
    seen = train(strategy, make, graph, gradients, use=use)
    (scale,) = [value for name, value in seen.items() if name.endswith("dynamic_scale")]
    assert scale != 16
    return seen


def state_is_written_and_read(strategy):
    """Another optimizer reads the state, and goes on."""

    def restore(optimizer, variables):
        optimizer.build(variables)
        optimizer.load_own_variables(kept)

    _, first, step = in_steps(strategy, EVERY["Adam"])
    for rows in batches(strategy, *rows_of_gradients(), size=ROWS):
        strategy.run(step, args=rows)
    kept = {}
    first.save_own_variables(kept)
    kept = {name: np.array(value) for name, value in kept.items()}
    return train(strategy, EVERY["Adam"], prepare=restore)


def configurations_come_back(strategy):
    """An optimizer made of another's configuration does the same, and has no name more."""
    with strategy.scope():
        first = optimizers.AdamW(0.05, weight_decay=0.1, clipnorm=0.8, use_ema=True)
    seen = train(strategy, lambda: type(first).from_config(first.get_config()))
    return seen | {f"key {key}": 1 for key in first.get_config()}


def public_names(strategy):
    """Return the public names of a trained optimizer: Keras's, and no others."""
    made = []

    def make():
        made.append(EVERY["Adam"]())
        return made[0]

    train(strategy, make)
    names = {f"has {name}": 1 for name in dir(made[0]) if not name.startswith("_")}
    return names | {f"configures {name}": 1 for name in made[0].get_config()}


def windows_end(strategy):
    """Counts of steps and of windows, at each step."""
    make = partial(optimizers.SGD, 0.1, gradient_accumulation_steps=3)
    _, optimizer, step = in_steps(strategy, make)
    seen = {}
    for number, rows in enumerate(batches(strategy, *rows_of_gradients(), size=ROWS)):
        strategy.run(step, args=rows)
        inner = innermost(optimizer)
        seen[f"steps {number}"] = inner._iterations.numpy()
        seen[f"windows {number}"] = inner.iterations.numpy()
        for i, waiting in enumerate(inner._accumulated_gradients):
            seen[f"waiting {i} at {number}"] = waiting.numpy()
    return seen


BOTH = {"graph": True, "eager": False}
SCENES = scenes(
    rates_are_set_between_steps,
    state_is_written_and_read,
    configurations_come_back,
    public_names,
    windows_end,
    **{
        f"{name} {setting} {how}": partial(
            train, make=partial(with_settings, make, **SETTINGS[setting]), graph=graph
        )
        for name, make in EVERY.items()
        for setting in SETTINGS
        for how, graph in BOTH.items()
        if graph or name == "Adam"
    },
    **{
        f"average of {momentum} overwritten {frequency} accumulated {window}": partial(
            train, make=averages(momentum, frequency, window)
        )
        for momentum, frequency, window in itertools.product(
            (0.0, 0.5, 0.99, 1.0), (None, 1, 3), (None, 2)
        )
    },
    **{f"decay_excludes {by}": partial(decay_excludes, by=by) for by in ("names", "list")},
    **{
        f"{scene.__name__} {how}": partial(scene, graph=graph)
        for scene in (constraints_hold, some_have_no_gradient, pairs_are_applied)
        for how, graph in BOTH.items()
    },
    **{
        f"rows_of_tables {name} {how}": partial(rows_of_tables, make=EVERY[name], graph=graph)
        for name in ("momentum", "Adam", "Adagrad", "RMSprop")
        for how, graph in BOTH.items()
    },
    **{
        f"scales_of_losses {name} {what.__name__} {how}": partial(
            scales_of_losses, inner=make, gradients=what, graph=graph
        )
        for name, make in {
            "Adam": EVERY["Adam"],
            "clipped": partial(with_settings, EVERY["momentum"], global_clipnorm=0.8),
            "accumulated": partial(with_settings, EVERY["momentum"], gradient_accumulation_steps=2),
            "averaged": averages(0.8, 2, None),
        }.items()
        for what in (rows_of_gradients, with_an_overflow)
        for how, graph in BOTH.items()
    },
)
