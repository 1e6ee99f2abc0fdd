"""Refusal by name of objects that were made outside of a strategy's scope, on every path."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy.twins import two

X, Y = np.ones([4, 3], np.float32), np.ones([4, 1], np.float32)


def built(name="foreign"):
    return keras.Sequential([keras.Input([3]), layers.Dense(1, name="last")], name=name)


@pytest.fixture(scope="module")
def strategy():
    return two()


OUTSIDE = (
    r"the model 'foreign' has variables that were made outside of its scope: foreign/last/kernel"
)


def test_a_model_of_outside_is_refused_where_it_is_compiled(strategy):
    model = built()
    with strategy.scope(), pytest.raises(ValueError, match=OUTSIDE):
        model.compile("sgd", "mse")


def test_a_part_of_a_model_as_well(strategy):
    part = built()
    with strategy.scope(), pytest.raises(ValueError, match="'whole' has variables.*last/kernel"):
        model = keras.Sequential([keras.Input([3]), part, layers.Dense(1)], name="whole")
        model.compile("sgd", "mse")


def test_a_model_that_is_not_built_may_come_from_outside(strategy):
    model = keras.Sequential([layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert len(strategy.experimental_local_results(model.weights[0].value)) == 2


def test_an_optimizer_of_outside_is_refused(strategy):
    optimizer = keras.optimizers.Adam(name="alone")
    optimizer.build([keras.Variable([0.0])])
    with strategy.scope():
        model = built()
        with pytest.raises(ValueError, match="the optimizer 'alone' has variables"):
            model.compile(optimizer, "mse")
            model.fit(X, Y, verbose=0)


def test_what_another_strategy_made_is_refused(strategy):
    with two().scope():
        model = built()
    with strategy.scope(), pytest.raises(ValueError, match="the scope of another ScaleStrategy"):
        model.compile("sgd", "mse")


def test_an_optimizer_of_another_strategy_in_a_loop_of_ones_own(strategy):
    with two().scope():
        optimizer = keras.optimizers.SGD(name="other")
    with strategy.scope():
        variable = keras.Variable([1.0])

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.ones([1])], [variable]))

    with pytest.raises(ValueError, match="the optimizer 'other' has variables that were made in"):
        step()


def test_a_scope_within_anothers_is_refused(strategy):
    message = "leave the `with` block of the other strategy"
    with two().scope(), pytest.raises(RuntimeError, match=message), strategy.scope():
        pass


def test_one_replica_takes_all():
    from tfscale import ScaleStrategy

    model = built()
    with ScaleStrategy(devices=["CPU:0"]).scope():
        model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def test_gradients_that_no_replica_has_computed_are_refused(strategy):
    with strategy.scope():
        model, optimizer = built(), keras.optimizers.Adam(name="own")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(X) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    words = r"(?s)'own' .* no replica has computed.*strategy\.run\(step"
    with pytest.raises(RuntimeError, match=words):
        step()
    with pytest.raises(RuntimeError, match=words):
        tf.function(step)()
    words = r"(?s)last/kernel.* outside of strategy.run.*strategy\.run\(step"
    with strategy.scope(), pytest.raises(ValueError, match=words):
        step()
    strategy.run(step)  # as the message says
    assert optimizer.iterations.numpy() == 1


def test_variables_that_an_optimizer_was_not_built_for_are_refused(strategy):
    """Keras refuses them on one device, too."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([3]), layers.Dense(2), layers.Dense(1, name="last")])
        model.compile(keras.optimizers.Adam(name="early"), "mse")
        model.optimizer.build(model.trainable_variables[:2])
    words = "'early' was built for 2 variables, .*last/kernel, .*last/bias, whose layers were"
    with pytest.raises(ValueError, match=words):
        model.fit(X, Y, verbose=0)
