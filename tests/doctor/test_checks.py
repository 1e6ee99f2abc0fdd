"""Single checks, on machines and networks that this one is not."""

import io
import re
import resource
import shutil
import socket
import types

import pytest
from helpers import ROOT
from rich.console import Console

from tfscale.native.toolchain import TensorFlow
from tfscale.support import cgroups
from tfscale.tools.doctor import all_reduce, check, library, machine, network, probe, show, versions
from tfscale.tools.doctor.probe import Seen

TF = TensorFlow("2.21.0", "v2.21.0", (), ())
WELL = Seen(TF, "3.15.1", "tensorflow", "", ())


def with_version(version, **others):
    tensorflow = TensorFlow(version, f"v{version}", (), ())
    return Seen(**{"keras": "3.15.1", "backend": "tensorflow", "tensorflow": tensorflow, **others})


# ---------------------------------------------------------------------- versions


def test_what_is_supported_is_what_others_say():
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.cfg").read_text())
    assert tuple(classifiers) == versions.PYTHONS
    said = (ROOT / "tfscale" / "bridge" / "installed.py").read_text()
    assert all(keras in said for keras in versions.KERAS_OF.values())
    building = (ROOT / "docs" / "building.md").read_text()
    assert "TensorFlow 2.20 or 2.21" in building


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (WELL, "ok", "3.15.1"),
        (with_version("2.15.1", keras="2.15.0"), "ok", "2.15.0"),
        (with_version("2.21.0", keras="3.3.1"), "warning", "tested with Keras 3.15"),
        (with_version("2.21.0", backend="jax"), "problem", "computes with jax"),
        (with_version("2.21.0", missing="Keras 3.99 has no x"), "problem", "has no x"),
        (with_version("2.21.0", keras=None, error="it broke"), "problem", "it broke"),
    ],
)
def test_keras(seen, state, words):
    found = versions.of_keras(seen)
    assert found.state == state
    assert words in found.found
    assert bool(found.advice) == (state != "ok")


@pytest.mark.parametrize(
    ("text", "environ", "backend"),
    [
        (None, {}, "tensorflow"),
        ('{"backend": "torch"}', {}, "torch"),
        ('{"backend": "torch"}', {"KERAS_BACKEND": "jax"}, "jax"),
        ('{"floatx": "float32"}', {}, "tensorflow"),
        ("no JSON", {}, "tensorflow"),
    ],
)
def test_the_backend_that_was_asked_for(tmp_path, text, environ, backend):
    if text is not None:
        (tmp_path / "keras.json").write_text(text)
    assert probe.asked_backend({"KERAS_HOME": str(tmp_path), **environ}) == backend


def test_tensorflow_2_15_needs_numpy_1(monkeypatch):
    monkeypatch.setattr(versions, "_version_of", lambda package: "2.4.6")
    assert versions.of_numpy(WELL).state == "ok"
    assert versions.of_numpy(with_version("2.15.1")).state == "problem"


def test_two_tensorflows_in_one_place(monkeypatch):
    monkeypatch.setattr(
        versions, "_version_of", {"tensorflow": "2.21", "tensorflow-cpu": "2.20"}.get
    )
    found = versions.of_tensorflow(WELL)
    assert found.state == "warning"
    assert "tensorflow 2.21 and tensorflow-cpu 2.20" in found.found


def test_a_process_that_gives_no_answer():
    assert "gave no answer" in probe.look(0.1).error


@pytest.mark.slow
def test_modules_of_the_users_folder_do_not_disturb_the_probe(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise RuntimeError('mine')")
    monkeypatch.chdir(tmp_path)
    seen = probe.look()
    assert not seen.error and seen.tensorflow and seen.keras


# ----------------------------------------------------------------------- machine


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A folder of a control group, in which a test writes the files of one."""
    monkeypatch.setattr(cgroups, "folders", lambda controller: [tmp_path / "none", tmp_path])

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu__max": "50000 100000"}, 0.5),
        ({"cpu__max": "max 100000"}, None),
        ({"cpu__cfs_quota_us": "50000", "cpu__cfs_period_us": "100000"}, 0.5),
        ({"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_processor_time(group, files, quota):
    group(**files)
    found = machine.cores()
    assert found.state == ("warning" if quota else "ok")
    assert ("only 0.5 of them" in found.found) == bool(quota)


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"memory__max": "1000000000", "memory__current": "400000000"}, "warning"),
        ({"memory__max": "max", "memory__current": "400000000"}, "ok"),
        ({"memory__limit_in_bytes": "1000000000", "memory__usage_in_bytes": "5"}, "warning"),
        ({"memory__limit_in_bytes": f"{2**63 - 4096}", "memory__usage_in_bytes": "5"}, "ok"),
    ],
)
def test_a_limit_of_memory(group, monkeypatch, files, state):
    monkeypatch.setattr(machine, "_meminfo_bytes", lambda name: 16 * 10**9)
    group(**files)
    found = machine.memory()
    assert found.state == state
    assert ("the container's limit is 1.0 GB" in found.found) == (state == "warning")


def test_files_that_are_only_cached_count_as_free(group, monkeypatch):
    monkeypatch.setattr(machine, "_meminfo_bytes", lambda name: 16 * 10**9)
    group(memory__max="4000000000", memory__current="3900000000")
    assert machine.memory().state == "warning"
    group(memory__stat="anon 500000000\ninactive_file 3400000000")
    assert machine.memory().state == "ok"


def test_this_process_is_in_groups_that_there_are():
    for controller in ("cpu", "memory"):
        assert all(
            str(folder).startswith("/sys/fs/cgroup") for folder in cgroups.folders(controller)
        )


@pytest.mark.parametrize(
    ("soft", "others", "streams", "state"),
    [
        (1024, 1, 1, "ok"),
        (resource.RLIM_INFINITY, 1000, 8, "ok"),
        (64, 0, 1, "warning"),
        (64, 99, 1, "problem"),
        (1024, 99, 8, "problem"),
    ],
)
def test_descriptors(monkeypatch, soft, others, streams, state):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, 4096))
    assert machine.descriptors(others, streams).state == state


def test_gpus_that_tensorflow_does_not_see(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for there, state in ((True, "warning"), (False, "ok")):
        monkeypatch.setattr(machine, "_has_nvidia", lambda there=there: there)
        assert machine.devices(WELL).state == state
    assert machine.devices(with_version("2.21.0", gpus=("A", "A"))).found == "2 GPUs: A, A"


def test_nccl_needs_room_in_shm(monkeypatch):
    docker = types.SimpleNamespace(total=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: docker)
    assert machine.shm(0).state == machine.shm(1).state == "ok"
    assert "--shm-size" in machine.shm(2).advice


# ----------------------------------------------------------------------- network


def test_an_interface_is_known_by_name_and_by_address():
    assert network.interfaces()["lo"] == "127.0.0.1"
    for asked in ("lo", "127.0.0.1"):
        found = network.interface({"TFSCALE_INTERFACE": asked}, [], 0)
        assert found.state == "ok"
        assert found.found.startswith("listens at 127.0.0.1 (lo)")


@pytest.mark.parametrize(
    ("environ", "state"), [({}, "warning"), ({"TFSCALE_TRANSPORT": "sockets"}, "problem")]
)
def test_an_address_of_another_machine(environ, state):
    """The check fails if the environment demands sockets: no other transport may replace them."""
    found = network.interface({"TFSCALE_INTERFACE": "192.0.2.111", **environ}, [], 0)
    assert found.state == state


def test_ports_that_are_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environ = {"TFSCALE_INTERFACE": "lo", "TFSCALE_PORTS": str(port)}
        assert (
            f"all ports of TFSCALE_PORTS={port} are taken"
            in network.interface(environ, [], 0).found
        )
    assert network.interface(environ, [], 0).state == "ok"


def test_the_loopback_is_no_place_to_be_reached_at():
    cluster = ["127.0.0.1:1", "192.0.2.1:1"]
    found = network.interface({"TFSCALE_INTERFACE": "lo"}, cluster, 0)
    assert found.state == "warning"
    assert "other hosts cannot reach that" in found.found


def test_ways():
    assert network.ways({"TFSCALE_TRANSPORT": "grpc"}).found.startswith("TensorFlow's gRPC")
    found = network.ways({"TFSCALE_STREAMS": "4", "TFSCALE_SHARED_MEMORY": "0"}).found
    assert "TCP within a host, 4 TCP streams" in found


def test_a_machine_that_does_not_know_itself(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert network.host_name().state == "warning"
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    found = network.host_name()
    assert found.state == "ok"
    assert "the loopback" in found.found


# ----------------------------------------------------------------------- cluster


def workers(own, *addresses):
    sources = pytest.importorskip("tfscale.cluster.sources")
    from tfscale.tools.doctor import cluster

    listed = ", ".join(f'"{address}"' for address in addresses)
    environ = {
        "TF_CONFIG": f'{{"cluster": {{"worker": [{listed}]}}, '
        f'"task": {{"type": "worker", "index": {own}}}}}'
    }
    source, found = cluster.find(environ)
    assert found.state == "ok"
    assert found.found.startswith(f"{sources.ORDER[0]}: this is worker {own} of {len(addresses)}")
    return {each.name: each for each in cluster.workers(source)}


@pytest.fixture
def server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_workers_before_a_training(server):
    found = workers(0, "127.0.0.1:1", f"localhost:{server}", "127.0.0.1:2")
    assert list(found) == ["workers"]
    assert found["workers"].found.startswith("3 of 3")


def test_an_own_port_that_is_taken(server):
    found = workers(0, f"127.0.0.1:{server}", "127.0.0.1:1")
    assert found["worker 0"].state == "warning"


def test_a_host_that_does_not_answer(monkeypatch):
    def silent(address, timeout):
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    found = workers(0, "127.0.0.1:1", "127.0.0.1:2")
    assert found["worker 1"].state == "problem"
    assert "no answer" in found["worker 1"].found
    assert "firewall" in found["worker 1"].advice


def test_localhost_among_other_hosts(monkeypatch):
    from tfscale.tools.doctor import cluster

    monkeypatch.setattr(cluster, "_answers", lambda name, address: None)
    found = workers(0, "localhost:1", "192.0.2.1:1")
    assert found["worker 0"].state == "problem"
    assert "own loopback" in found["worker 0"].found


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "the first source that is set, of TF_CONFIG, torchrun, Open MPI, MPICH (PMI), Slurm"),
        ({"TFSCALE_LAUNCH": "1"}, "TF_CONFIG alone, as TFSCALE_LAUNCH is set"),
    ],
)
def test_the_order_of_sources(environ, said):
    from tfscale.tools.doctor import cluster

    assert cluster.order(environ).found == said


def test_a_cluster_whose_workers_learn_where_the_others_are():
    pytest.importorskip("tfscale.cluster.sources")
    from tfscale.tools.doctor import cluster

    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    source, found = cluster.find(environ)
    assert found.found.startswith("torchrun: this is worker 1 of 2; workers learn")
    assert [each.state for each in cluster.workers(source)] == ["ok"]
    source, _ = cluster.find({**environ, "MASTER_ADDR": "no-such-host.invalid"})
    assert [each.state for each in cluster.workers(source)] == ["problem"]


# -------------------------------------------------------------- library, all-reduce


def test_what_is_stale_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TFSCALE_CACHE", str(tmp_path))
    monkeypatch.delenv("TFSCALE_LIBRARY", raising=False)
    folder = tmp_path / "tensorflow-2.1.0-abc"
    folder.mkdir()
    (folder / "libtfscale.so").write_bytes(b"...tfscale-build: tensorflow=2.1.0;sources=x\0...")
    found = library.library(TF, may_build=False)
    assert found.state == "ok"
    assert re.search(
        r"not built yet .*stale: \S+/libtfscale.so in the cache, built 20.* for TensorFlow 2.1.0",
        found.found,
    )


LAUNCHER = """#!/bin/sh
echo "$@" > {folder}/words
trap 'echo asked to end; kill $!; exit 1' TERM
{does}
"""
FOUND = """{"workers": 2, "ways": "by TCP to 1", "why_not_sockets": "", "latency_seconds": 5e-5, \
"bytes_per_second": null, "auto": [{"numbers": 1000, "algorithm": "ring", "seconds": 1e-3}]}"""


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Stands for the interpreter that runs `tfscale launch`."""

    def make(does):
        program = tmp_path / "launcher"
        program.write_text(LAUNCHER.format(folder=tmp_path, does=does))
        program.chmod(0o700)
        monkeypatch.setattr(all_reduce.sys, "executable", str(program))
        return tmp_path / "words"

    return make


def test_between_hosts(launcher):
    words = launcher(f"echo hello; echo 'DOCTOR {FOUND}'")
    found = all_reduce.between("a:1,b:1", "ssh", 60)
    expected = (
        "-m tfscale launch --no-prefix --hosts a:1,b:1 --ssh ssh -m tfscale.tools.doctor.worker\n"
    )
    assert words.read_text() == expected
    told = all_reduce.check(found)
    assert told.state == "ok"
    assert "2 workers, by TCP to 1: latency 50 µs, more bytes per second than" in told.found


def test_hosts_that_fail(launcher):
    launcher("echo 'ssh: b: no such host'; exit 3")
    with pytest.raises(all_reduce.Failed, match=r"ended with 3.*\n.*ssh: b: no such host"):
        all_reduce.between("a:1,b:1", "ssh", 60)


def test_hosts_that_hang_are_told_to_end(launcher):
    launcher("sleep 1000 & wait $!")
    with pytest.raises(all_reduce.Failed, match=r"still runs after 1 s.*\n.*asked to end"):
        all_reduce.between("a:1,b:1", "ssh", 1)


def test_a_launcher_that_prints_nothing_of_the_worker(launcher):
    launcher("echo hello")
    with pytest.raises(all_reduce.Failed, match=r"worker 0 has not said.*\n.*hello"):
        all_reduce.between("a:1,b:1", "ssh", 60)


# -------------------------------------------------------------------------- show


def printed(told, **options):
    out = io.StringIO()
    console = Console(file=out, highlight=False, markup=False, soft_wrap=True, **options)
    show.line(console, told)
    return out.getvalue()


def test_a_line_for_each_check():
    told = check.warning("memory", "little [of it]", "Buy some.")
    lines = printed(told).splitlines()
    assert lines == ["warning  memory       little [of it]", " " * 22 + "Buy some."]


def test_colour_on_a_terminal_only_and_folding_everywhere():
    told = check.problem("memory", "word " * 40, "Buy some.")
    assert "\x1b[" not in printed(told)
    assert 75 < max(map(len, printed(told).splitlines())) <= 80
    shown = printed(told, force_terminal=True, width=60, color_system="standard", _environ={})
    assert "\x1b[" in shown
    bare = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, bare.splitlines())) <= 60
