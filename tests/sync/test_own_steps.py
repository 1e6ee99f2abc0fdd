"""Steps of users in rounds and in groups: moving averages, moves of weights, own clips."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfscale import ScaleStrategy, sync

RULES = {
    "local": sync.LocalSGD(4),
    "diloco": sync.DiLoCo(4, fragments=2, delay=1),
    "elastic": sync.ElasticAveraging(2, alpha=0.2),
    "gossip": sync.Gossip(2, "ring"),
}


def replicas(number, rule):
    return ScaleStrategy(
        "ring", devices=[f"CPU:{i}" for i in range(number)], sync=rule, deadline=60
    )


def data(rows=64):
    random = np.random.default_rng(0)
    return [random.standard_normal((rows, width)).astype("f4") for width in (6, 3)]


class OfOneLayer(keras.Model):
    def __init__(self):
        super().__init__()
        self.net = layers.Dense(3)
        self.net.build([None, 6])
        self.built = True

    def call(self, x):
        return self.net(x)

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        return tape.gradient(loss, self.net.trainable_variables)

    def train_step(self, data):
        gradients = self.changed(self.gradients(*data))
        self.optimizer.apply(gradients, self.net.trainable_variables)
        return {"norm": tf.linalg.global_norm(gradients)}

    def changed(self, gradients):
        return gradients


def trained(kind, strategy=None, callbacks=(), rows=64, epochs=1, **of_fit):
    keras.utils.set_random_seed(1)
    with strategy.scope() if strategy else tf.distribute.get_strategy().scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data(rows)
    model.fit(x, y, 8, epochs, shuffle=False, verbose=0, callbacks=[*callbacks], **of_fit)
    return model


def copies(variable):
    return [copy.numpy() for copy in variable.value.values]


class Teacher(OfOneLayer):
    """A model whose target network is a moving average of its weights, as in BYOL and DQN."""

    def __init__(self):
        super().__init__()
        self.teacher = layers.Dense(3)
        self.teacher.build([None, 6])
        self.teacher.set_weights(self.net.get_weights())
        self.teacher.trainable = False

    def train_step(self, data):
        logs = super().train_step(data)
        for mean, own in zip(self.teacher.weights, self.net.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * own)
        return logs


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", [RULES["local"], RULES["gossip"]], ids=repr)
def test_moving_averages_of_weights_agree_when_fit_returns(rule):
    model = trained(Teacher, replicas(2, rule), epochs=2)
    for variable in model.weights:
        one, other = copies(variable)
        np.testing.assert_array_equal(one, other, err_msg=variable.path)


class NotesNorm(OfOneLayer):
    def __init__(self):
        super().__init__()
        self.norm = self.add_weight(name="norm", trainable=False)

    def changed(self, gradients):
        self.norm.assign(tf.linalg.global_norm(gradients))
        return gradients


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "rule",
    [sync.LocalSGD(4, start=2), sync.Hierarchical(outer=sync.LocalSGD(4), group=2)],
    ids=repr,
)
def test_values_that_a_team_computes_of_its_gradients_agree_when_fit_returns(rule):
    assert np.ptp(copies(trained(NotesNorm, replicas(4, rule)).norm)) == 0


class Moves(OfOneLayer):
    """A model that moves its weights within a step, as SAM does, here by nothing."""

    factor = 0.0

    def train_step(self, data):
        moves = self.gradients(*data)
        for weight, move in zip(self.net.trainable_variables, moves, strict=True):
            weight.assign_sub(self.factor * move)
        return super().train_step(data)


class MovesFar(Moves):
    factor = 0.1


class Middle(keras.callbacks.Callback):
    """Notes the weights of each replica after some steps."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            self.seen = [copies(v) for v in self.model.trainable_variables]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "rule",
    [RULES["elastic"], RULES["gossip"], pytest.param(RULES["diloco"], marks=pytest.mark.slow)],
    ids=repr,
)
def test_a_rule_mixes_weights_that_a_step_has_moved_as_all_others(rule):
    found = []
    for kind in (OfOneLayer, Moves):
        middle = Middle()
        trained(kind, replicas(4, rule), [middle])
        found.append(middle.seen)
    assert any(np.ptp(each, axis=0).max() > 1e-3 for each in found[0])  # replicas differ
    for expected, moved in zip(*found, strict=True):
        np.testing.assert_allclose(moved, expected, atol=1e-6, rtol=0)


class Clips(OfOneLayer):
    def changed(self, gradients):
        return tf.clip_by_global_norm(gradients, 0.1)[0]


def test_an_own_clip_in_a_synchronous_start_is_that_of_the_whole_batch():
    expected = trained(Clips)
    found = trained(Clips, replicas(2, sync.LocalSGD(4, start=1000)))
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


def test_an_own_clip_in_a_group_is_that_of_its_part_of_the_batch():
    """Both groups get the same rows, so that they train as one device with these."""
    x, y = data(32)

    def fitted(strategy, size):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = Clips()
            model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = np.concatenate([np.tile(np.arange(i, i + 8), size // 8) for i in range(0, 32, 8)])
        norms = model.fit(x[rows], y[rows], size, shuffle=False, verbose=0).history["norm"]
        return [*model.get_weights(), np.array(norms)]

    expected = fitted(tf.distribute.get_strategy(), 8)
    rule = sync.Hierarchical(outer=sync.LocalSGD(100), group=2)
    for one, other in zip(fitted(replicas(4, rule), 16), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)


def test_an_own_clip_of_sums_that_come_late_is_refused():
    with pytest.raises(ValueError, match="BoundedStaleness.*changes its gradients before"):
        trained(Clips, replicas(2, sync.BoundedStaleness(1)))
    trained(Moves, replicas(2, sync.BoundedStaleness(1)))


def test_replicas_agree_when_fit_returns_though_each_has_moved_its_weights():
    for weight in trained(MovesFar, replicas(2, sync.BoundedStaleness(1))).net.weights:
        assert np.ptp(copies(weight), axis=0).max() == 0


class TrainsItself(OfOneLayer):
    """A model with a layer that holds an optimizer, as in the Forward-Forward algorithm."""

    def __init__(self):
        super().__init__()
        self.net.own = keras.optimizers.Adam(0.01)
        self.net.own.build(self.net.trainable_variables)

    def train_step(self, data):
        self.net.own.apply(self.gradients(*data), self.net.trainable_variables)
        return {"loss": 0.0}


def test_optimizers_that_layers_hold_are_refused_in_rounds():
    with pytest.raises(ValueError, match="'adam.*', which the model does not hold itself"):
        trained(TrainsItself, replicas(2, RULES["local"]))
    trained(TrainsItself, replicas(2, None))
