"""The private names of TensorFlow and Keras that ``tfscale.recompute`` leans on.

Each test stands for one of them; where a new version breaks it, its name says what to mend.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import mirrored
from keras.src.trainers.epoch_iterator import EpochIterator
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from tests.recompute.models import data, residual
from tfscale.bridge.graphs import after, has_state
from tfscale.callbacks import Recompute
from tfscale.training.recompute.batch import batch_of_fit
from tfscale.training.recompute.gate import behind, use


@pytest.fixture
def model():
    keras.utils.set_random_seed(1)
    model = residual(1)
    model.compile("sgd", "mse")
    return model


def as_it_runs(function, *arguments):
    """The function's operations when TensorFlow has optimized it."""
    context.context().enable_graph_collection()
    try:
        function(*arguments)
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    graphs = [graph for one in metadata.function_graphs for graph in one.partition_graphs]
    return max(graphs, key=lambda graph: len(graph.node)).node


# ---------------------------------------------------------------- TensorFlow


def test_what_we_put_between_operations_stays_and_fuses_nothing():
    """``_grappler_do_not_remove`` on a ``PreventGradient``, with a control output for its end."""

    @tf.function
    def products(x, weights, bias):
        def one(x):
            product = tf.matmul(x, weights)
            return product, tf.nn.bias_add(product, bias)

        fused = one(x)[1]
        product, taken = one(2 * x)
        use(product)
        return fused + taken + behind(3 * x)

    x = tf.ones((4, 4))
    nodes = as_it_runs(products, x, x, tf.ones(4))
    kinds = [node.op for node in nodes]
    assert kinds.count("PreventGradient") == 2
    assert sum("FusedMatMul" in kind for kind in kinds) == 1
    assert kinds.count("BiasAdd") == 1


def test_an_operation_still_waits_for_another_one_that_it_depends_on_through_ours():
    """A ``Merge``, of which functions know that it runs independently."""

    @tf.function
    def waits(x, count):
        count.assign_add(1.0)
        first = tf.matmul(x, x)
        with tf.control_dependencies([after([first.op], "gate")]):
            late = behind(x)
        with tf.control_dependencies([first.op]):
            return first + tf.sigmoid(late)

    nodes = {node.name: node for node in as_it_runs(waits, tf.ones((4, 4)), tf.Variable(0.0))}
    (sigmoid,) = (node for node in nodes.values() if node.op == "Sigmoid")
    assert "^MatMul" in sigmoid.input
    assert "^MatMul" in nodes["gate"].input
    assert not [name for name in nodes["gate/open"].input if name.startswith("^")]


def test_shapes_are_seen_through_what_we_put_between():
    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def same(x):
        return behind(x)

    assert same.get_concrete_function().outputs[0].shape.as_list() == [None, 3]


def test_what_comes_behind_a_read_is_where_its_user_is():
    """A read of a variable has no device of its own."""
    variable = tf.Variable(1.0)

    @tf.function
    def reads():
        with tf.device(None):
            value = variable.read_value()
        assert not value.op.device
        with tf.device("CPU:0"):
            assert behind(value).op.device.endswith("CPU:0")
        return value

    reads.get_concrete_function()


def test_nothing_is_sent_into_a_gradient_through_it():
    with pytest.raises(LookupError), tf.Graph().as_default():
        x = tf.ones(2)
        tf.gradients(behind(x), x)


def test_an_operation_takes_another_input():
    """``_update_input``"""
    with tf.Graph().as_default():
        x, y = tf.constant(1.0), tf.constant(2.0)
        total = x + x
        total.op._update_input(1, y)
        assert [tensor.name for tensor in total.op.inputs] == [x.name, y.name]


def test_functions_of_loops_are_found_in_their_graph():
    """``_get_function(...).cached_definition``"""

    @tf.function
    def loop(x):
        return tf.while_loop(lambda i: i < 3, lambda i: i + tf.random.uniform(()), [x])

    graph = loop.get_concrete_function(0.0).graph
    (operation,) = [op for op in graph.get_operations() if "While" in op.type]
    body = graph._get_function(operation.get_attr("body").name).cached_definition
    assert "RandomUniform" in [node.op for node in body.node_def]


def test_what_is_stateful_is_registered():
    assert op_def_registry.get("AssignVariableOp").is_stateful
    assert not op_def_registry.get("StatelessRandomUniformV2").is_stateful


def test_lists_of_tensors_know_the_shape_of_their_elements():
    with tf.Graph().as_default():
        made = tf.raw_ops.TensorListReserve(
            element_shape=tf.constant([2, 3]), num_elements=4, element_dtype=tf.float32
        )
        (element,) = get_resource_handle_data(made).shape_and_type
    assert tf.TensorShape(element.shape).as_list() == [2, 3]
    assert tf.as_dtype(element.dtype) == tf.float32


def test_data_sets_know_how_they_were_batched():
    """``_batch_size`` and ``_inputs``"""
    batched = tf.data.Dataset.range(5).batch(2)
    assert tf.get_static_value(batched._batch_size) == 2
    assert batched.prefetch(1)._inputs() == [batched]


def test_batches_of_replicas_have_specifications_of_each():
    """``_value_specs``"""
    strategy = mirrored()
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert len(batches.element_spec._value_specs) == 2


# --------------------------------------------------------------------- Keras


def test_a_fit_holds_its_batches_in_a_local_name(model):
    """``epoch_iterator``, with ``data_adapter`` and ``_distributed_dataset``"""
    found = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(batch_of_fit(self.model))

    x, y = data(model)
    model.fit(x, y, 8, verbose=0, callbacks=[Look()])
    assert found == [(tf.TensorSpec((8, 6, 8)), tf.TensorSpec((8, 1)))]
    iterator = EpochIterator(x, y, batch_size=8)
    assert iterator.data_adapter.batch_size == 8
    assert isinstance(iterator.data_adapter.get_tf_dataset(), tf.data.Dataset)


def test_a_fit_runs_the_train_function_that_callbacks_left(model):
    """``train_function``, read again for each step; ``make_train_function`` keeps what is there."""
    steps = []

    class Replace(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            train = self.model.train_function
            self.model.train_function = lambda batch: steps.append(1) or train(batch)

    x, y = data(model)
    model.fit(x, y, 8, verbose=0, callbacks=[Replace()])
    assert len(steps) == 2
    replaced = model.train_function
    model.make_train_function()
    assert model.train_function is replaced


def test_each_fit_has_a_history_of_its_own(model):
    """Made before it begins: so a fit that failed is told from the next."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(self.model.history)

    x, y = data(model)
    for _ in range(2):
        model.fit(x, y, 8, verbose=0, callbacks=[Look()])
    assert seen[0] is not seen[1]
    assert model.history is seen[1]


def test_a_function_that_is_called_by_its_name_may_have_state():
    """A CTC loss has such an operation."""
    assert has_state("a_function_of_this_graph")
    assert not has_state("Add")


def test_layers_and_the_operations_of_a_graph_are_found(model):
    assert {layer.name for layer in model.layers} <= {x.name for x in model._flatten_layers()}
    assert "relu" in [operation.name.split("_")[0] for operation in model.operations]


def test_a_layer_calls_the_call_of_the_object():
    """An attribute shadows the method."""
    layer = keras.layers.ReLU()
    vars(layer)["call"] = lambda x: x + 1
    np.testing.assert_array_equal(layer(np.zeros(2)), [1, 1])


def test_sums_keep_their_order_where_grappler_takes_memory_for_short():
    """Otherwise terms are added in the order in which they arrive: see bridge/grappler.py."""
    numbers, answers = np.ones([8192, 8], np.float32), np.ones([8192, 1], np.float32)

    def train(*callbacks):
        x = inputs = keras.Input([8])
        x = keras.layers.Dense(1024)(x)
        for _ in range(4):
            kinds = ("tanh", "sigmoid", "softsign")
            x = keras.layers.Add()([keras.layers.Activation(kind)(x) for kind in kinds])
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(numbers, answers, 8192, verbose=0, callbacks=callbacks)

    plain = {node.op for node in as_it_runs(train)}
    ours = {node.op for node in as_it_runs(train, Recompute(segments="sqrt", verbose=0))}
    assert "TemporaryVariable" in plain - ours
