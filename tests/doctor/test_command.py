"""``tfscale doctor`` as it is called, on a machine that is well and on machines that are not."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

pytest.importorskip("tfscale.cluster.sources")  # with which the command looks for a cluster

SECONDS = 300
COMMAND = [sys.executable, "-m", "tfscale", "doctor"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("TF_CONFIG", "CXX", "KERAS_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("TFSCALE_")]:
        monkeypatch.delenv(name)


def run(*words, before=(), **environment):
    return subprocess.run(
        [*before, *COMMAND, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_hooks_are_listed_and_nothing_is_checked():
    ran = run("--hooks", CXX="no compiler")
    assert ran.returncode == 0, ran.stderr
    assert "until the step is traced\n  keras.optimizers.Optimizer.apply\n" in ran.stdout
    assert "gradients are summed over replicas before they are clipped" in ran.stdout
    listed = json.loads(run("--hooks", "--json").stdout)["hooks"]
    (one,) = [hook for hook in listed if hook["name"] == "set_model"]
    assert one["whose"] == "keras.callbacks.CallbackList"
    assert one["until"] == "the last strategy is gone"


def report(*words, **options):
    """The object that it prints, and the checks by their names; the status must agree."""
    ran = run("--json", *words, **options)
    assert ran.stdout.count("\n") == 1, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert len(checks) == len(found["checks"])
    wrong = [check for check in found["checks"] if check["state"] == "problem"]
    assert found["ok"] == (not wrong) == (ran.returncode == 0)
    for check in found["checks"]:
        assert set(check) == {"name", "state", "found", "advice"}
        assert (check["state"] == "ok") == (not check["advice"]), check
    return found, checks


def states(checks, state):
    return {name for name, check in checks.items() if check["state"] == state}


def of_two(second, index=0):
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": ["127.0.0.1:1", second]}, "task": task})


def test_a_machine_that_is_well():
    found, checks = report()
    assert found["ok"], found
    assert " by shared memory to 1" in checks["all-reduce"]["found"]
    assert found["all_reduce"]["workers"] == 2
    assert found["all_reduce"]["sum_is_right"] is True
    assert found["all_reduce"]["latency_seconds"] >= 0
    assert [each["numbers"] for each in found["all_reduce"]["auto"]] == [1000, 10**6, 25 * 10**6]
    assert {each["algorithm"] for each in found["all_reduce"]["auto"]} == {"ring"}
    assert ", fits" in checks["library"]["found"]
    assert {"Python", "TensorFlow", "Keras", "NumPy", "tfscale", "cluster"} <= states(checks, "ok")
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert not [name for name in checks if f"`{name}`" not in page]


def test_each_wrong_setting_is_named_with_what_to_do():
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    found, checks = report(
        "--quick",
        before=limited,
        TFSCALE_INTERFACE="nonsense",
        TFSCALE_CACHE="/proc/tfscale",
        TFSCALE_LIBRARY=__file__,
        TF_CONFIG=of_two("no-such-host.invalid:2222"),
    )
    assert found["all_reduce"] is None
    assert {"descriptors", "interface", "cache"} <= states(checks, "warning")
    assert states(checks, "problem") == {"library", "worker 1"}
    assert checks["descriptors"]["found"].startswith("64 open files")
    assert "ulimit -n 1024" in checks["descriptors"]["advice"]
    assert "nonsense is neither a network interface" in checks["interface"]["found"]
    assert "TFSCALE_INTERFACE" in checks["interface"]["advice"]
    assert "cannot be written" in checks["cache"]["found"]
    assert "was not made by `tfscale build`" in checks["library"]["found"]
    assert "unset TFSCALE_LIBRARY" in checks["library"]["advice"]
    assert "does not know the host name no-such-host.invalid" in checks["worker 1"]["found"]
    assert checks["workers"]["found"].startswith("1 of 2 ")
    assert checks["sources"]["found"].startswith(
        "the first source that is set, of TF_CONFIG, torchrun"
    )


@pytest.mark.slow
def test_nothing_to_build_with_and_a_broken_cluster(tmp_path):
    found, checks = report(
        PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), TFSCALE_PORTS="http", TF_CONFIG="{"
    )
    assert states(checks, "problem") == {"compiler", "transport", "cluster"}
    assert "no g++ and no clang++" in checks["compiler"]["found"]
    assert "apt-get install g++" in checks["compiler"]["advice"]
    assert "not built yet" in checks["library"]["found"]
    assert "got 'http'" in checks["transport"]["found"]
    assert "TF_CONFIG is not JSON" in checks["cluster"]["found"]
    assert found["all_reduce"] is None
    assert "all-reduce" not in checks


# ---------------------------------------------------------------- workers that fail

PROGRAM = """
import json, os, signal, sys, time
if sys.orig_argv[1:] == ["-m", "tfscale.tools.doctor.worker"]:
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        print("a library is missing", flush=True)
        {fate}
"""


@pytest.fixture
def fate(tmp_path, monkeypatch):
    """Lets worker 1 meet its fate before it does anything else."""

    def meet(fate):
        (tmp_path / "sitecustomize.py").write_text(PROGRAM.format(fate=fate))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
        return {"PYTHONPATH": os.environ["PYTHONPATH"]}

    return meet


@pytest.mark.slow
def test_a_worker_that_dies_in_the_all_reduce(fate):
    ran = run(**fate("os.kill(os.getpid(), signal.SIGKILL)"))
    assert ran.returncode == 1
    assert ran.stdout.count("PROBLEM") == 1
    problem = " ".join(ran.stdout.partition("PROBLEM")[2].split())
    assert "all-reduce failed between two processes of this host: worker 1 of 2 " in problem
    assert "was killed by SIGKILL" in problem
    long = [line for line in ran.stdout.splitlines() if len(line) > 80]
    assert not [line for line in long if " " in line[22:]]  # a path stays in one piece
    assert "a library is missing" in ran.stdout
    assert ran.stdout.endswith("Training would fail: see all-reduce.\n")
    assert "\x1b[" not in ran.stdout


def test_a_worker_that_hangs_in_the_all_reduce(fate):
    fate("time.sleep(1000)")
    from tfscale.tools.doctor import all_reduce

    with pytest.raises(all_reduce.Failed, match="worker . of 2 still runs after 2 s"):
        all_reduce.on_this_host(2)


# ------------------------------------------------------- a TensorFlow that is not well


@pytest.fixture
def tensorflow(tmp_path):
    """Another TensorFlow, and Keras, that come first."""

    def make(tensorflow, keras="__version__ = '9.9.9'"):
        for name, text in (("tensorflow", tensorflow), ("keras", keras)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text(text)
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    return make


def test_no_tensorflow(tensorflow):
    _, checks = report("--quick", **tensorflow("raise ImportError('not today')"))
    assert states(checks, "problem") == {"TensorFlow", "Keras"}
    assert "not today" in checks["TensorFlow"]["found"]
    assert "pip install tensorflow-cpu" in checks["TensorFlow"]["advice"]


def test_a_tensorflow_that_breaks_on_loading(tensorflow):
    _, checks = report("--quick", **tensorflow("raise AttributeError('_ARRAY_API not found')"))
    assert "_ARRAY_API not found" in checks["TensorFlow"]["found"]
    assert checks["TensorFlow"]["advice"].startswith("Try ")


BREAKS_LATER = """
import os, signal, types
version = types.SimpleNamespace(VERSION="2.99.0", GIT_VERSION="v2.99.0")
sysconfig = types.SimpleNamespace(get_compile_flags=lambda: [], get_link_flags=lambda: [])
def list_physical_devices(kind):
    os.kill(os.getpid(), signal.SIGSEGV)
config = types.SimpleNamespace(list_physical_devices=list_physical_devices)
"""


def test_devices_that_end_the_process(tensorflow):
    """The command still prints what it found out before."""
    _, checks = report("--quick", **tensorflow(BREAKS_LATER))
    assert checks["TensorFlow"]["state"] == "warning"
    assert checks["TensorFlow"]["found"].startswith("2.99.0")
    assert "2.20" in checks["TensorFlow"]["found"]
    assert checks["Keras"]["state"] == "problem"
    assert checks["devices"]["state"] == "problem"
    assert "ended by SIGSEGV" in checks["devices"]["found"]


@pytest.mark.full
def test_a_backend_that_is_not_installed():
    _, checks = report("--quick", KERAS_BACKEND="torch")
    assert states(checks, "problem") == {"Keras"}
    assert checks["Keras"]["found"].endswith(", which computes with torch")
    assert "KERAS_BACKEND=tensorflow" in checks["Keras"]["advice"]
    assert checks["TensorFlow"]["state"] == "ok"


# ------------------------------------------------------------------ command line


@pytest.mark.parametrize("words", [["--quick", "--hosts", "a,b"], ["--fast"], ["now"]])
def test_words_that_make_no_sense(words):
    ran = run(*words)
    assert ran.returncode == 2
    assert "usage: tfscale doctor" in ran.stderr


def test_it_loads_no_tensorflow_itself():
    program = (
        "import sys, tfscale.tools.doctor; assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=SECONDS)
