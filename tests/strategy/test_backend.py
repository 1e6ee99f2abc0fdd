"""backend="tensorflow": TensorFlow's own collectives train as one device does, too."""

import functools

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from helpers import PATIENCE
from keras import layers

import tfscale
from tests import warm
from tests.covering import params
from tests.strategy.cases import BY_NAME, LAYOUTS, cost, rows
from tests.strategy.compare import check
from tests.strategy.groups import SECONDS, judge, start, take, trained_once
from tests.strategy.test_faults import error, event, run
from tfscale.callbacks import Recompute, Telemetry

TENSORFLOW = "tensorflow"
DEVICES = ["CPU:0", "CPU:1"]
train = functools.partial(take, "exact.py")

# What goes its own way from a gradient to its sum.
DELICATE = ("global_clipnorm", "embedding", "batch_norm", "last_batch_of_1", "float16_overflow")


@pytest.fixture(scope="module")
def trained(request):
    return trained_once(request, "exact.py", BY_NAME, LAYOUTS)


def aspects(row):
    """Each delicate case once, and each layout."""
    layout, name = row
    return [layout, *([name] if name in DELICATE else [])]


@pytest.mark.one_in(5)
@pytest.mark.timeout(2 * SECONDS + 60)
@pytest.mark.parametrize(("layout", "case"), params(rows(), aspects, cost))
def test_replicas_train_as_one_device(trained, layout, case):
    (expected,) = trained("none", "1x1")[case]
    judge(
        functools.partial(check, BY_NAME[case], expected),
        trained(TENSORFLOW, layout)[case],
        lambda: train(TENSORFLOW, layout, [case])[case],
    )


def test_workers_end_without_a_word():
    with start("end.py", "2x1", STRATEGY=TENSORFLOW, CASES="") as group:
        outputs = group.wait(SECONDS)
    for output in outputs:
        assert "DONE" in output
        assert "Traceback" not in output
        assert "ignored in" not in output


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "way", ["kill", *(pytest.param(way, marks=pytest.mark.slow) for way in ("raise", "stop"))]
)
def test_workers_hear_who_has_failed(way):
    deadline = 10 if way == "stop" else PATIENCE
    outputs = run(way, 1, workers=3, deadline=deadline, BACKEND=TENSORFLOW)
    for survivor in (0, 2):
        when, _, message = error(outputs[survivor])
        print(f"MEASURED {way}: worker {survivor} knew after {when - event(outputs[1]):.2f} s")
        reason = {
            "kill": "is gone",
            "raise": "gave up: its program failed: KeyError: 'no such row'",
            "stop": "no sign of life",
        }[way]
        # TensorFlow may miss a connection first; then the log says whose it was.
        said = message if "rank 1" in message else outputs[survivor]
        assert "rank 1 (worker 1 at 127.0.0.1:" in said
        assert reason in said


# ---------------------------------------------------------------- in this process


def on(**arguments):
    return tfscale.ScaleStrategy(devices=DEVICES, backend=TENSORFLOW, **arguments)


def fitted(strategy, callbacks=(), epochs=2):
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((96, 8), np.float32)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(64, activation="relu"),
                layers.BatchNormalization(),
                layers.Dense(64, activation="relu"),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(x, x.sum(1), 32, epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def weights(model):
    return np.concatenate([w.numpy().ravel() for w in model.weights])


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("wire", "off"), [("bf16", 2**-8), ("fp16", 2**-11)])
def test_wires_are_as_exact_as_their_type(wire, off):
    exact, strategy = weights(fitted(on())), on(wire={"kernel": wire})
    found = weights(fitted(strategy))
    assert 0 < np.abs(found - exact).max() < off
    assert [row.wire for row in strategy.explain()].count(wire) == 1


def test_explain_says_who_sums():
    strategy = on()
    fitted(strategy, epochs=1)
    shown = " ".join(str(strategy.explain()).split())
    print(strategy.explain())
    assert """by TensorFlow's ring (backend="tensorflow")""" in shown
    assert "They go by TensorFlow's ring" in shown
    with pytest.raises(ValueError, match="no choices to write"):
        strategy.dump("choices.json")


@pytest.mark.slow
def test_telemetry_says_what_it_cannot_know():
    telemetry = Telemetry(batch=32)
    fitted(on(), [telemetry])
    said = " ".join(str(telemetry.summary()).split())
    assert "Bytes and times of communication are not known" in said


@pytest.mark.slow
def test_recomputation_gives_the_same_bits():
    np.testing.assert_array_equal(
        weights(fitted(on())), weights(fitted(on(), [Recompute(segments="sqrt", verbose=0)]))
    )


def test_auto_takes_the_engine_on_cpus():
    strategy = tfscale.ScaleStrategy("ring", devices=DEVICES)
    fitted(strategy, epochs=1)
    assert {row.algorithm for row in strategy.explain()} == {"ring"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"wire": "int8"}, "'int8'"),
        ({"wire": {"kernel": "sign", "*": "bf16"}}, "'sign'"),
        ({"error_feedback": True}, "no error feedback"),
        ({"algorithm": "ring"}, "algorithm='ring'"),
        ({"schedule_file": "choices.json"}, "schedule_file='choices.json'"),
        ({"transport": "sockets"}, "transport='sockets'"),
    ],
)
def test_what_tensorflow_cannot_do_is_refused(arguments, why):
    with pytest.raises(ValueError, match=why) as refused:
        on(**arguments)
    assert "backend='engine'" in str(refused.value)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="'auto', 'engine' or 'tensorflow'; got 'nccl'"):
        tfscale.ScaleStrategy(devices=DEVICES, backend="nccl")


def each(strategy, body, *values):
    """Return the results of ``body`` on each replica, in a graph; ``values`` are by replica."""

    @tf.function
    def run():
        given = [
            strategy.experimental_distribute_values_from_function(
                lambda context, v=value: tf.constant(v[context.replica_id_in_sync_group])
            )
            for value in values
        ]
        return strategy.experimental_local_results(strategy.run(body, given))

    return [one.numpy() for one in run()]


def test_rows_come_in_the_order_of_ranks_whatever_devices_are_called():
    strategy = tfscale.ScaleStrategy(devices=DEVICES[::-1], backend=TENSORFLOW)

    def gathered(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            every = tf.distribute.get_replica_context().all_gather(x, 0)
            loss = tf.reduce_sum(every * tf.range(1.0, 4.0))
        return tf.concat([every, tape.gradient(loss, x)], 0)

    rows = [[10.0, 11.0], [20.0]]
    first, second = each(strategy, gathered, rows)
    np.testing.assert_array_equal(first, [10, 11, 20, 2, 4])
    np.testing.assert_array_equal(second, [10, 11, 20, 6])


def test_sums_in_a_loop_of_each_replica_do_not_wait_forever():
    def looped(x):
        context = tf.distribute.get_replica_context()
        return tf.while_loop(
            lambda i, y: i < 3,
            lambda i, y: (i + 1, context.all_reduce("sum", y)),
            (tf.constant(0), x),
        )[1]

    assert each(on(deadline=30), looped, [1.0, 2.0]) == [12, 12]


def test_the_cause_is_raised_where_an_eager_replica_fails():
    """Run in a process of its own: TensorFlow's collectives have ended in it."""
    program = """
import tensorflow as tf, tfscale
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfscale.ScaleStrategy(backend="tensorflow", deadline=60)
values = strategy.experimental_distribute_values_from_function(
    lambda context: [tf.constant(1.0), tf.constant("a")][context.replica_id_in_sync_group])
try:
    strategy.reduce("SUM", values, None)
except TypeError as error:
    print(error)
"""
    assert "replicas cannot exchange values of type string, only numbers" in finished(program)


def finished(program):
    done = warm.run(["-c", program], environment={"TF_CONFIG": "{}"}, seconds=200)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_one_replica_watches_nobody_and_says_nothing_at_its_end():
    program = """
import tfscale, threading
tfscale.ScaleStrategy(devices=["CPU:0"], backend="tensorflow")
assert not any(thread.name.startswith("tfscale") for thread in threading.enumerate())
"""
    assert "Traceback" not in finished(program)


@pytest.mark.slow
def test_collectives_leave_no_threads():
    """TensorFlow's timeout would leave a thread for each collective, until the timeout is over."""
    strategy = on()
    model = fitted(strategy, epochs=2)
    x = np.ones([96, 8], np.float32)
    before = psutil.Process().num_threads()
    model.fit(x, x.sum(1), 2, epochs=1, verbose=0)  # 48 steps, each with several collectives
    assert psutil.Process().num_threads() < before + 48
