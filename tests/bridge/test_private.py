"""The private names of TensorFlow and Keras that the strategy leans on are what it takes them for.

Each test stands for one of them; where a new version breaks it, its name says what to mend.
"""

from __future__ import annotations

import inspect
import zipfile

import helpers
import keras
import keras.src.trainers.data_adapters.generator_data_adapter
import keras.src.trainers.epoch_iterator
import numpy as np
import pytest
import tensorflow as tf
from keras.src.saving.keras_saveable import KerasSaveable
from tensorflow.python.eager import context

from tests.strategy.models import ADAM, classifier, numbers
from tfscale import ScaleStrategy
from tfscale.bridge import (
    calls,
    fit,
    functions,
    gradients,
    graphs,
    losses as bridge_losses,
    runtime,
    started,
    stateless,
    tensorflow,
)
from tfscale.bridge.backup import InMemory
from tfscale.bridge.hooks import RESTORE
from tfscale.bridge.objects import LAYER_SEED, innermost
from tfscale.exchange.slots import ATTRIBUTE
from tfscale.strategy.extended import Extended, _EngineOps
from tfscale.strategy.share import Share
from tfscale.strategy.variables import LocalWeight, Statistic, Tally, Weight
from tfscale.sync import DiLoCo

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(scope="module")
def strategy():
    return ScaleStrategy("ring", devices=DEVICES)


@pytest.fixture(scope="module")
def mirrored():
    return helpers.mirrored()


def parameters(function):
    return list(inspect.signature(function).parameters)


# ---------------------------------------------------------------- TensorFlow

SIGNATURES = [
    (Extended, "_use_merge_call", ["self"]),
    (Extended, "_replica_ctx_all_reduce", ["self", "reduce_op", "value", "options"]),
    (Extended, "_reduce_to", ["self", "reduce_op", "value", "destinations", "options"]),
    (
        Extended,
        "_gather_to_implementation",
        ["self", "value", "destinations", "axis", "options"],
    ),
    (Extended, "_create_variable", ["self", "next_creator", "kwargs"]),
    (Extended, "_validate_colocate_with_variable", ["self", "colocate_with_variable"]),
    (Extended, "_initialize_local_devices", ["self", "cluster_resolver", "worker_device"]),
    (
        Extended,
        "_get_variable_creator_initial_value",
        ["self", "replica_id", "device", "primary_var", "kwargs"],
    ),
    (_EngineOps, "_all_reduce", ["self", "reduce_op", "value", "replica_id", "options"]),
    (
        _EngineOps,
        "_all_reduce_per_replica_values",
        ["self", "reduce_op", "per_replica_values", "options"],
    ),
    (_EngineOps, "_batch_all_gather", ["self", "per_replica_values", "axis", "options"]),
    (Weight, "_update_replica", ["self", "update_fn", "value", "kwargs"]),
    (Weight, "_update_cross_replica", ["self", "update_fn", "value", "kwargs"]),
    (Weight, "_get_cross_replica", ["self"]),
    (Weight, "_get_replica", ["self", "replica_id"]),
    (Weight, "_get_on_device_or_primary", ["self"]),
    (Weight, "_gather_saveables_for_checkpoint", ["self"]),
]


@pytest.mark.parametrize(
    ("ours", "name", "expected"), SIGNATURES, ids=[name for _, name, _ in SIGNATURES]
)
def test_what_is_overridden_is_there_with_the_same_parameters(ours, name, expected):
    """Found in a class of TensorFlow that ours comes from."""
    (original, *_) = [
        vars(base)[name]
        for base in ours.__mro__
        if name in vars(base) and base.__module__.startswith("tensorflow")
    ]
    assert parameters(original) == expected


def test_a_tape_that_was_used_has_no_tape():
    """See ``bridge.tapes``: entering such a one again would make a new one, in silence."""
    x = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = x * x
        assert tensorflow.could_possibly_record()
        assert tape._recording
        with tape.stop_recording():
            assert not tape._recording
            assert not tensorflow.could_possibly_record()
    assert not tensorflow.could_possibly_record()
    with tape:  # goes on recording
        z = 2.0 * y
    assert tape._tape is not None
    assert tape.gradient(z, x) == 4.0
    assert tape._tape is None


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_are_parts_of_their_callers(compiled):
    @tf.function(jit_compile=compiled)
    def double(x):
        return x + x if tf.reduce_all(x > 0.0) else x

    @tf.function
    def outer(x):
        with functions.inlined():
            inside = double(x)
        return inside, double(x)

    operations = outer.get_concrete_function(tf.constant(3.0)).graph.get_operations()
    assert [op.type for op in operations if "PartitionedCall" in op.type] == (
        ["PartitionedCall"] * (2 if compiled else 1)
    )
    assert [float(x) for x in outer(tf.constant(3.0))] == [6.0, 6.0]


def test_all_loss_objects_reduce_by_one_function():
    seen = []

    def reduce(call, losses, how):
        seen.append((losses.shape, how.reduction, bridge_losses.name_of_called()))
        return call(losses, how)

    loss = keras.losses.MeanSquaredError(name="mine")
    with bridge_losses.reducing(reduce):
        loss(tf.zeros([2, 1]), tf.ones([2, 1]))
    loss(tf.zeros([2, 1]), tf.ones([2, 1]))
    assert seen == [((2,), "sum_over_batch_size", "mine")]


def test_health_checks_can_be_turned_off():
    assert tensorflow.CollectiveAllReduceExtended._enable_check_health is True
    assert Extended._enable_check_health is False


def test_tensorflows_own_service_may_be_told_how_long_to_wait():
    """Before it starts; a strategy asks whether that was done. See ``starting``."""
    arguments = ["service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs"]
    assert set(arguments) <= set(parameters(context.Context.configure_coordination_service))
    starts = inspect.getsource(tensorflow.CollectiveAllReduceExtended._initialize_multi_worker)
    assert "context.context().coordination_service is None" in starts


def test_cross_device_ops_are_asked_in_merge_and_in_replicas(strategy):
    """Both objects are looked up by these names, at each use."""
    extended = strategy.extended
    assert isinstance(extended._cross_device_ops, _EngineOps)
    assert isinstance(extended._host_cross_device_ops, _EngineOps)
    assert extended._use_merge_call() is False
    assert extended._num_replicas_in_sync == 2
    assert (extended._num_workers, extended._id_in_cluster) == (1, 0)
    assert len(extended._devices) == 2


def test_variables_are_made_from_a_table_of_classes(strategy):
    """``variables_of`` replaces the table while a variable is made."""
    expected = ["strategy", "real_mirrored_creator", "class_mapping", "policy_mapping", "kwargs"]
    assert parameters(tensorflow.distribute_utils.create_mirrored_variable) == expected
    kinds = tensorflow.distribute_utils.VARIABLE_CLASS_MAPPING.values()
    assert {tensorflow.MirroredVariable, tensorflow.SyncOnReadVariable} <= set(kinds)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], name="a/weight")
        count = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
    assert type(variable) is Weight
    assert type(count) is Tally
    assert issubclass(tensorflow.MirroredVariable, tensorflow.DistributedVariable)
    assert variable._common_name == "a/weight"
    assert [v.device[-5:] for v in variable.values] == DEVICES
    assert variable._primary is variable.values[0]


def test_an_outer_optimizer_has_ordinary_variables():
    """All replicas update them alike, while the weights are each replica's own between rounds."""
    rounds = ScaleStrategy("ring", devices=DEVICES, sync=DiLoCo(every=2))
    with rounds.scope():
        optimizer = keras.optimizers.SGD(0.1)
        variable = keras.Variable([1.0], name="w")
        optimizer.build([variable])
    assert type(variable.value) is LocalWeight
    outer = rounds.rounds.outer[optimizer]
    floats = [v.value for v in outer.variables if v.value.dtype.is_floating]
    assert floats and {type(v) for v in floats} == {Weight}


def test_what_the_runtime_is_asked():
    asked = ("get_config_key_value", "abort_collective_ops", "check_collective_ops_peer_health")
    assert all(callable(getattr(runtime.context(), name)) for name in asked)
    assert runtime.context()._initialized is True
    assert started.has_devices()
    assert callable(runtime.coordination_leader)


def test_a_gradient_is_replaced_for_a_while():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.constant(2.0)
        stopped = tf.stop_gradient(3 * x)
        assert tf.gradients(stopped, x) == [None]
        with gradients.differentiated_by([stopped.op], lambda op, dy: dy):
            (found,) = tf.gradients(stopped, x)
        assert found is not None
        assert tf.gradients(stopped, x) == [None]


def test_functions_and_inputs_of_graphs_are_found_and_replaced():
    inner = tf.function(lambda x: x + 1.0)

    @tf.function(autograph=False)
    def outer(x):
        return inner(x), 2.0 * x

    graph = outer.get_concrete_function(tf.constant(1.0)).graph
    (call,) = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert graphs.function_in(graph, call.get_attr("f").name).graph.get_operations()
    (product,) = [op for op in graph.get_operations() if op.type == "Mul"]
    with graph.as_default():
        other = tf.constant(7.0)
    graphs.replace_input(product, 1, other)
    assert product.inputs[1].op is other.op
    assert graphs.has_state("AssignVariableOp")
    assert not graphs.has_state("MatMul")


def test_a_replica_assigns_through_update_replica(strategy):
    """A value that differs between replicas is reduced there, and nowhere else."""
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def step():
        strategy.run(lambda: variable.assign_add(1.0 + _replica()))

    step()
    assert [float(v) for v in variable.values] == [3.0, 3.0]


def _replica():
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def test_a_replica_context_reduces_through_the_extended(strategy, monkeypatch):
    seen = []

    def note(self, reduce_op, value, options=None):
        seen.append(reduce_op)
        return value

    monkeypatch.setattr(Extended, "_replica_ctx_all_reduce", note)

    @tf.function
    def step():
        return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0))

    step()
    assert seen == [tf.distribute.ReduceOp.SUM] * 2


def test_replica_contexts_know_their_number(strategy):
    ids = []

    @tf.function
    def step():
        strategy.run(lambda: ids.append(tf.distribute.get_replica_context()._replica_id))

    step()
    assert sorted(ids) == [0, 1]


def test_regroup_makes_values_of_a_class():
    made = tensorflow.regroup((tf.constant(1.0), tf.constant(2.0)), wrap_class=tensorflow.Mirrored)
    assert isinstance(made, tensorflow.Mirrored)
    assert isinstance(made, tensorflow.DistributedValues)
    assert isinstance(tensorflow.regroup((1.0, 2.0)), tensorflow.PerReplica)
    assert [float(v) for v in made.values] == [1.0, 2.0]


def test_assign_on_device_assigns():
    variable = tf.Variable(1.0)
    tensorflow.assign_on_device(variable.device, variable, tf.constant(2.0))
    assert float(variable) == 2.0


def test_saveables_are_made_of_a_tensor_a_spec_and_a_name():
    assert parameters(tensorflow.SaveableObject.__init__) == ["self", "op", "specs", "name"]
    assert parameters(tensorflow.SaveSpec.__init__)[:4] == ["self", "tensor", "slice_spec", "name"]
    assert parameters(tensorflow.SaveableObject.restore) == [
        "self",
        "restored_tensors",
        "restored_shapes",
    ]


def test_a_checkpoint_restores_by_positions(tmp_path):
    assert parameters(tensorflow.CheckpointPosition.restore) == ["self", "trackable", "reader"]
    found, variable = [], tf.Variable(1.0)

    def restore(original, position, *args, **kwargs):
        found.append(args[0])
        original(position, *args, **kwargs)

    root = tf.Module()
    with RESTORE.on(tensorflow.CheckpointPosition, restore):
        path = tf.train.Checkpoint(variable=variable).save(tmp_path / "saved")
        tf.train.Checkpoint(root).restore(path)
        root.variable = tf.Variable(2.0)
    assert found[-1] is root.variable
    assert float(root.variable) == 1.0


def test_keras_gives_variables_their_values_at_the_end_of_a_stateless_scope():
    called = []
    with keras.StatelessScope():
        stateless.call_when_variables_have_values(lambda: called.append("later"))
        assert not called
    assert called == ["later"]
    stateless.call_when_variables_have_values(lambda: called.append("now"))
    assert called == ["later", "now"]


def test_eager_mode_is_a_context():
    with tf.Graph().as_default():
        assert not tf.executing_eagerly()
        with tensorflow.eager_mode():
            assert tf.executing_eagerly()


def test_xla_is_recognised_while_it_traces():
    found = []

    def trace():
        found.append(runtime.is_compiled_by_xla())

    tf.function(trace, jit_compile=True).get_concrete_function()
    tf.function(trace).get_concrete_function()
    assert found == [True, False]


def test_dividing_by_a_share_asks_for_a_tensor_called_y():
    """A share tells divisors from factors by this name; see also test_share.py."""
    asked = []

    class Asked(Share):
        def __tf_tensor__(self, dtype=None, name=None):
            asked.append((dtype, name))
            return super().__tf_tensor__(dtype, name)

    share = Asked(2, tf.constant(1), tf.constant(2))
    _ = tf.constant(1.0) / share, tf.cast(share, tf.float32), tf.constant(1.0) * share
    assert asked == [(None, "y"), (None, "x"), (tf.float32, None)]


# --------------------------------------------------------------------- Keras


@pytest.fixture(scope="module")
def model(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        built = classifier(lambda: ADAM(clipnorm=1.0, gradient_accumulation_steps=2))()
        built.optimizer.build(built.trainable_variables)
    return built


def test_optimizers_clip_through_an_attribute(model):
    """``_clip_gradients`` is the first thing that happens to a window's sum, and to no other."""
    seen = []
    optimizer = ADAM(gradient_accumulation_steps=2)
    variable = keras.Variable([1.0, 1.0])
    optimizer.build([variable])
    vars(optimizer)["_clip_gradients"] = lambda grads: seen.append(grads) or grads
    for gradient in (1.0, 3.0):
        optimizer.apply([tf.constant([gradient, gradient])])
    np.testing.assert_array_equal(seen[-1][0], [2.0, 2.0])


def test_optimizers_apply_through_an_attribute():
    """``apply_gradients`` and ``train_step`` call what an instance's ``apply`` is."""
    seen = []
    optimizer = ADAM()
    vars(optimizer)["apply"] = lambda grads, variables=None: seen.append(list(grads))
    optimizer.apply_gradients([(1.0, keras.Variable(1.0))])
    assert seen == [[1.0]]


def test_optimizers_know_their_variables_by_index(model):
    optimizer = model.optimizer
    assert optimizer._trainable_variables == model.trainable_variables
    places = [optimizer._get_variable_index(v) for v in model.trainable_variables]
    assert places == list(range(len(places)))


def test_variables_of_optimizers_have_the_names_that_tell_their_kinds(model):
    names = [v.name for v in model.optimizer.variables]
    assert names[0] == "iteration"
    assert sum("gradient_accumulator" in name for name in names) == len(model.trainable_variables)


def test_a_new_optimizer_calls_the_strategy_from_its_constructor(strategy):
    """The first of its variables is the "iteration"; its maker is found on the stack."""
    with strategy.scope():
        optimizer = ADAM()
        variable = keras.Variable([0.0])
        assert not hasattr(optimizer, ATTRIBUTE)
        optimizer.build([variable])
    assert hasattr(optimizer, ATTRIBUTE)


def test_a_loss_scale_optimizer_holds_the_one_that_accumulates():
    inner = ADAM(gradient_accumulation_steps=2)
    outer = keras.optimizers.LossScaleOptimizer(inner)
    assert innermost(outer) is inner
    assert innermost(inner) is inner


NAMES = ("tfscale_part", "tfscale_common", "tfscale_shard", "tfscale_rounding_seed", LAYER_SEED)


@pytest.mark.parametrize("name", [*NAMES, "residual"])
def test_names_make_no_slots(strategy, name):
    """A user's variable is an ordinary one, whatever its name."""
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0], name=name)
        statistic = tf.Variable(1.0, trainable=False, name=name)
    assert (type(variable.value), type(statistic)) == (Weight, Statistic)
    variable.assign([3.0, 4.0])
    assert [v.numpy().tolist() for v in variable.value.values] == [[3.0, 4.0]] * 2


def test_seeds_have_the_name_that_tells_them():
    assert keras.random.SeedGenerator(1).state.path.split("/")[-1] == LAYER_SEED
    assert keras.layers.Dropout(0.1).seed_generator.state.path.endswith(LAYER_SEED)


def test_compiled_losses_are_a_list_of_tuples_with_a_loss(model):
    """``call`` looks up both by name, each time."""
    losses = model._compile_loss
    assert losses.built is False
    losses.build(tf.zeros([2], tf.int32), tf.zeros([2, 3]))
    assert losses.built is True
    (one,) = vars(losses)["_flat_losses"]
    assert one._fields == ("path", "loss", "loss_weights", "name")
    seen = []
    vars(losses)["_flat_losses"] = [one._replace(loss=lambda *args: seen.append(args) or 0.0)]
    losses(tf.zeros([2], tf.int32), tf.zeros([2, 3]))
    vars(losses)["_flat_losses"] = [one]
    assert len(seen) == 1
    assert len(seen[0]) == 3  # y_true, y_pred, sample_weight


def test_a_loss_calls_an_attribute_and_reads_the_mask_of_what_that_returns():
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    of_samples, seen = loss.call, []
    loss.call = lambda *args: seen.append(of_samples(*args)) or seen[-1]
    found = loss(tf.constant([0, 1]), tf.fill([2, 2], 0.5))
    np.testing.assert_array_equal(seen[0]._keras_mask, [True, False])
    np.testing.assert_allclose(found, np.log(2), rtol=1e-6)


def test_compiled_metrics_have_a_name_and_may_be_left_for_later(model):
    assert "_compile_metrics" in vars(model)
    vars(model)["_compile_metrics"] = None
    model._symbolic_build(data_batch=(tf.zeros([2, 6]), tf.zeros([2], tf.int32)))


def test_losses_say_how_they_reduce():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    assert loss.reduction == "mean_with_sample_weight"
    assert keras.losses.MeanSquaredError().reduction == "sum_over_batch_size"


def test_masks_hang_on_what_layers_return():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(tf.constant([[1, 0]]))
    np.testing.assert_array_equal(embedded._keras_mask, [[True, False]])


def test_losses_are_scaled_by_the_number_of_replicas_that_the_strategy_tells(strategy):
    """Keras asks in each step; while it lasts the answer is a share."""
    from keras.src.losses.loss import scale_loss_for_distribution, unscale_loss_for_distribution

    from tfscale.strategy.step import Step, during

    share = Share(2, tf.constant(1), tf.constant(8))
    with strategy.scope(), during(Step(share=share)):
        assert scale_loss_for_distribution(tf.constant(1.0)) == 1 / 8
        assert unscale_loss_for_distribution(tf.constant(1.0)) == 8


def test_layers_are_found_through_all_levels():
    inner = keras.Sequential([keras.Input([2]), keras.layers.BatchNormalization()])
    outer = keras.Sequential([keras.Input([2]), inner])
    found = [type(layer).__name__ for layer in outer._flatten_layers()]
    assert "BatchNormalization" in found


def test_batch_normalization_synchronizes_by_an_attribute(strategy):
    """Keras reads ``synchronized`` in each call, and reduces in its replica's context."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(center=False, scale=False, epsilon=1e-9)
        layer.build([None, 1])
    assert layer.synchronized is False
    layer.synchronized = True

    @tf.function
    def step():
        # Replica r holds r and r + 1: together the mean is 1.
        return strategy.run(lambda: layer(tf.add(_replica(), [[0.0], [1.0]]), training=True))

    first, second = strategy.experimental_local_results(step())
    np.testing.assert_allclose(first[0, 0], -second[1, 0], atol=1e-5)
    np.testing.assert_allclose(first[1, 0], 0, atol=1e-5)


def test_keras_averages_a_first_batch_for_its_shapes(model, monkeypatch):
    """Keras does so in ``_maybe_symbolic_build``, where replicas' batches may differ in size."""
    callers = []

    def noted():
        names = [frame.function for frame in inspect.stack()]
        callers.extend(names)
        return "_maybe_symbolic_build" in names

    monkeypatch.setattr(fit, "wants_only_shapes", noted)
    x, y = numbers(5)
    model.fit(x, y, batch_size=3, verbose=0)
    assert "_maybe_symbolic_build" in callers


def test_a_fit_begins_once_however_often_it_validates(model, monkeypatch):
    """``fit`` builds its model once, and ``evaluate`` builds it for itself."""
    begun, ours = [], fit.begins

    def noted():
        # One call is between this and the scope, as without this function.
        found = ours()
        begun.extend([found] if found else [])
        return found

    monkeypatch.setattr(fit, "begins", noted)
    held, callback = numbers(4), keras.callbacks.Callback()
    how = {"epochs": 2, "validation_data": held, "verbose": 0}
    model.fit(*numbers(4), callbacks=[callback], **how)
    length = {"number of epochs": 2, "initial_epoch": 0, "batch_size": None}
    length |= {"number of steps in an epoch": 1, "validation_data": "some"}
    length |= {"validation_freq": 1, "number of steps in a validation": 1}
    assert begun == [(model, [callback], length)]
    model.fit(*numbers(4), **how)
    model.evaluate(*held, verbose=0)
    assert begun[1:] == [(model, [], length)]


def test_backups_have_their_names(model):
    """``WholeBackup`` overrides two of them and reads and sets the others."""
    callback = keras.callbacks.BackupAndRestore("folder")
    assert parameters(callback._save_model) == parameters(callback._load_model) == []
    names = ["_weights_path", "_prev_weights_path", "_training_metadata_path"]
    assert {*names, "_current_epoch", "_last_batch_seen"} <= set(vars(callback))
    for name in ("_save_model", "_should_save_model"):
        found = parameters(getattr(keras.callbacks.ModelCheckpoint, name))
        assert found[:4] == ["self", "epoch", "batch", "logs"]
    assert model._initial_epoch is None
    assert "self._initial_epoch or initial_epoch" in inspect.getsource(type(model).fit)


def test_weights_go_to_a_file_in_memory_and_come_from_there(model):
    before = [v.numpy() for v in model.variables]
    file = InMemory("some.weights.h5")
    model.save_weights(file)
    model.set_weights([0 * w for w in model.get_weights()])
    model.load_weights(InMemory("some.weights.h5", file.getvalue() + b"and more"))
    for one, other in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(one, other.numpy())
    file = InMemory("some.keras")
    model.save(file)
    assert zipfile.is_zipfile(file)


def test_what_reads_data_and_predicts_has_its_names(model):
    adapter = keras.src.trainers.data_adapters.generator_data_adapter.GeneratorDataAdapter

    def batches():
        yield numbers(4)

    iterator = keras.src.trainers.epoch_iterator.EpochIterator(batches())
    assert isinstance(iterator.data_adapter, adapter)
    assert "one_step_on_data_distributed" in inspect.getsource(keras.Model.make_predict_function)
    assert isinstance(model._loss_tracker, keras.metrics.Metric)


def test_keras_hands_steps_to_run_as_methods_of_the_model(model):
    assert fit.step_of(model.train_step) == fit.ModelStep(model, "train_step", True)
    assert fit.step_of(model.test_step) == fit.ModelStep(model, "test_step", False)
    assert fit.step_of(model.predict_step) is None
    assert "self.train_step" in inspect.getsource(keras.Model.make_train_function)


def test_what_is_saveable_has_a_type_and_hooks():
    class Thing(KerasSaveable):
        def _obj_type(self):
            return "Loss"

    assert {"save_own_variables", "load_own_variables"} <= set(dir(keras.layers.Layer))
    assert Thing()._obj_type() == "Loss"


def test_keras_asks_for_the_family_of_the_strategy(strategy):
    """Keras reduces logs and joins predictions for this class alone."""
    from keras.src.backend.tensorflow import trainer

    assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert trainer._collective_all_reduce_multi_worker(strategy) is False  # one process


def test_a_function_that_autograph_leaves_alone_hands_on_what_it_would_do(strategy):
    """``run`` is one: the user's function is converted, ours is not."""
    positive = []

    def body(x):
        if x > 0:  # needs autograph
            positive.append(True)
            return x
        return -x

    @tf.function
    def step(x):
        return strategy.run(body, (x,))

    first, second = strategy.experimental_local_results(step(tf.constant(-2.0)))
    assert (float(first), float(second)) == (2.0, 2.0)
    assert positive


def test_a_variable_that_is_overwritten_by_its_gradient_is_refused(strategy):
    with strategy.scope():
        optimizer = keras.optimizers.SGD()
        scale = keras.Variable(1.0, name="scale")
    scale.overwrite_with_gradient = True
    with pytest.raises(ValueError, match="the variable scale is overwritten with its gradient"):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [scale]))


def test_a_plain_number_is_reduced_on_one_replica():
    assert float(ScaleStrategy(devices=["CPU:0"]).reduce("SUM", 1.5, axis=None)) == 1.5


def test_who_makes_gradients_is_seen():
    seen = []

    @tf.custom_gradient
    def noted(x):
        def gradient(dy):
            seen.append(calls.goes_back())
            return dy

        return x, gradient

    with tf.GradientTape() as tape:
        x = tf.Variable(1.0)
        y = noted(x)
    tape.gradient(y, x)
    tf.function(lambda x: tf.gradients(noted(x), x))(tf.constant(1.0))
    assert seen == [True, True]
    assert not calls.goes_back()
