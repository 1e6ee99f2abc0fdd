"""Strategies that fit the machine, and arguments that ``ScaleStrategy`` refuses."""

import json

import pytest
import tensorflow as tf

import tfscale
from tfscale import ScaleStrategy
from tfscale.collectives import Schedule, ScheduleError, finalise
from tfscale.strategy import auto
from tfscale.strategy.extended import local_devices

TWO = ["CPU:0", "CPU:1"]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("TF_CONFIG", "TPU_NAME", "COLAB_TPU_ADDR"):
        monkeypatch.delenv(name, raising=False)


def told(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class TestAuto:
    def test_one_device_costs_nothing(self, caplog):
        strategy = tfscale.auto_strategy(devices=["CPU:0"], wire="bf16")
        assert strategy is tf.distribute.get_strategy()
        assert "TensorFlow's default strategy, because there is one device" in caplog.text
        (warning,) = told(caplog)
        assert warning.endswith("does not use the arguments devices, wire")

    def test_several_devices(self, caplog):
        strategy = tfscale.auto_strategy(algorithm="tree", devices=TWO)
        assert isinstance(strategy, ScaleStrategy)
        assert strategy.num_replicas_in_sync == 2
        assert "ScaleStrategy, because there are 2 devices" in caplog.text

    @pytest.mark.parametrize("name", ["TPU_NAME", "COLAB_TPU_ADDR"])
    def test_a_tpu_is_found_by_its_address(self, monkeypatch, name):
        assert not auto._has_tpu()
        monkeypatch.setenv(name, "grpc://10.0.0.1:8470")
        assert auto._has_tpu()


class TestWorkers:
    """Tests in which the number of workers decides; nobody starts them."""

    def count(self):
        return auto._workers(tf.distribute.cluster_resolver.TFConfigClusterResolver())

    def test_without_a_cluster_there_is_one(self):
        assert self.count() == 1

    @pytest.mark.parametrize(
        ("cluster", "workers"),
        [
            ({"worker": ["a:1"]}, 1),
            ({"worker": ["a:1", "b:1"]}, 2),
            ({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, 3),
            ({"worker": ["a:1"], "evaluator": ["b:1"]}, 1),
        ],
    )
    def test_tf_config_tells_them(self, monkeypatch, cluster, workers):
        config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        assert self.count() == workers

    def test_so_does_any_resolver(self):
        spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"]})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_id=0)
        assert auto._workers(resolver) == 2


class TestDevices:
    def test_all_logical_cpus_are_the_default(self):
        every = [f"device:CPU:{i}" for i in range(len(tf.config.list_logical_devices("CPU")))]
        assert local_devices(None) == ("CPU", every)

    @pytest.mark.parametrize("name", ["CPU:1", "cpu:1", "/device:CPU:1", "/cpu:1", "device:CPU:1"])
    def test_a_device_may_be_written_as_people_do(self, name):
        assert local_devices([name]) == ("CPU", ["device:CPU:1"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"algorithm": "rign"}, "rign"),
        ({"wire": "int7"}, "int7"),
        ({"wire": {"kernel": "int7"}}, "int7"),
        ({"wire": {"*kernel": "int8"}}, "is a regular expression"),
        ({"wire": 8}, "wire is 'fp32'"),
        (
            {"devices": ["CPU:0", "CPU:99"]},
            "'CPU:99', which this process does not have.* CPU:0, CPU:1",
        ),
        (
            {"devices": 2},
            r"devices is a list of names, .*\['CPU:0', 'CPU:1', .*\]; got 2",
        ),
        ({"devices": "CPU:0"}, "devices is a list of names, .* got 'CPU:0'"),
        ({"devices": [0, 1]}, r"devices\[0\] is a text; got 0"),
        ({"devices": []}, r"devices is a list of names, .* got \[\]"),
        ({"devices": ["CPU:0", "cpu:0"]}, "devices names a device twice"),
        ({"batch_norm": "sync"}, "batch_norm is 'synchronized' or 'local'; got 'sync'"),
        ({"schedule_file": __file__}, 'schedule_file=.*test_auto.py.* needs algorithm="auto"'),
        ({"bucket_bytes": 0}, "bucket_bytes is a number of bytes, 1 or more, .*; got 0"),
        ({"bucket_bytes": "25 M&Ms"}, "bucket_bytes is .* such as .*'25MB'.*; got '25 M&Ms'"),
        ({"deadline": 0}, "deadline"),
        ({"deadline": "1 min"}, "deadline is a number of seconds, more than 0; got '1 min'"),
        ({"error_feedback": "yes"}, "error_feedback is True or False; got 'yes'"),
        ({"cluster_resolver": "host:1"}, "cluster_resolver is one of tf.distribute.* got 'host:1'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_with_what_was_received(arguments, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        ScaleStrategy(**{"algorithm": "ring", "devices": TWO, **arguments})


def test_sizes_are_written_as_people_do():
    assert ScaleStrategy("ring", devices=TWO, bucket_bytes="25MB").reducer._bucket_bytes == 25e6


def test_a_wire_on_one_replica_has_no_effect_and_that_is_said(caplog):
    ScaleStrategy(devices=["CPU:0"], wire="int8")
    ScaleStrategy(devices=["CPU:0"])
    ScaleStrategy("ring", devices=TWO, wire="int8")
    (warning,) = told(caplog)
    assert warning.startswith("wire='int8' has no effect: there is one replica, so no gradients")


def test_the_log_says_who_trains_and_names_no_strategy_of_tensorflow(caplog):
    with caplog.at_level("INFO"):
        ScaleStrategy("ring", devices=TWO)
    (said,) = [record for record in caplog.records if record.name in ("tfscale", "tensorflow")]
    assert said.getMessage() == "ScaleStrategy: 2 replicas train, on CPU:0, CPU:1"
    with caplog.at_level("INFO"):
        tf.get_logger().info("heard again")
    assert "heard again" in caplog.text


def test_a_schedule_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="mine.json' does not exist .*strategy.dump"):
        ScaleStrategy(devices=TWO, schedule_file=tmp_path / "mine.json")


def test_a_schedule_file_must_be_for_as_many_ranks(tmp_path):
    from tfscale.collectives import Link
    from tfscale.collectives.choose import Chooser

    Chooser(Link(1e-4, 1e-9), 1e-10, 4).dump(tmp_path / "four.json")
    with pytest.raises(ValueError, match="ranks.* 2, the number of ranks that take part"):
        ScaleStrategy(devices=TWO, schedule_file=tmp_path / "four.json")


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda ranks: Schedule("nothing", ranks, 1, lambda rank: [finalise(0)]),
        Schedule("nothing", 2, 1, lambda rank: [finalise(0)]),
    ],
)
def test_a_schedule_that_would_give_wrong_sums_is_refused(algorithm):
    with pytest.raises(ScheduleError, match="'nothing' for 2 ranks would not give the right"):
        ScaleStrategy(algorithm, devices=TWO)


@pytest.mark.parametrize("content", [b"[" * 100_000, bytes(range(256)), "{}".encode("utf-16")])
def test_a_schedule_file_that_is_no_text_of_json_is_one_error(tmp_path, content):
    (tmp_path / "mine.json").write_bytes(content)
    with pytest.raises(ValueError, match="mine.json: expected"):
        ScaleStrategy(devices=TWO, schedule_file=tmp_path / "mine.json")


def test_devices_in_the_place_of_the_algorithm_are_refused_with_what_to_write():
    with pytest.raises(ValueError, match=r"here pass devices=\['CPU:0', 'CPU:1'\]"):
        ScaleStrategy(["CPU:0", "CPU:1"])
