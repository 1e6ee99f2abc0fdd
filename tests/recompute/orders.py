"""Trainings by random orders: any node may be computed again, any number of times."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tests.recompute.models import assert_same_training
from tfscale.callbacks import Recompute
from tfscale.training.recompute.phases import for_each
from tfscale.training.recompute.plan import Plan
from tfscale.training.recompute.results import Event


class RandomOrder(Recompute):
    """A callback that computes random nodes again at random moments."""

    def __init__(self, seed):
        super().__init__(segments="sqrt", verbose=0)
        self._choose = lambda step, pile_up, tell: for_each(
            step, lambda one: random_plan(one, pile_up, seed)
        )


def random_plan(step, pile_up, seed):
    rng = np.random.default_rng(seed)
    plan = Plan(step, (), pile_up=pile_up)
    share = rng.uniform(0.1, 0.9)
    openers = [node for node in plan.results.openers if rng.random() < 0.6]
    nodes = np.arange(len(plan.results))
    events = (
        Event(node, tuple(nodes[rng.random(len(nodes)) < share].tolist())) for node in openers
    )
    return dataclasses.replace(plan, events=tuple(events))


def assert_random_orders_train_the_same(build, seeds, **settings):
    for seed in seeds:
        callback = RandomOrder(seed)
        assert_same_training(build, callback, **settings)


class OwnStep(keras.Model):
    """A model with a train step of its own."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class PartsStep(keras.Model):
    """A model that is never called: its train step calls its layers."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.second(self.first(x, training=True)) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}
