"""Users who install a package have no checkout: imports, builds and types come from the package."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# What a training does at first; two devices of one process.
PROGRAM = """
import keras, numpy as np, tensorflow as tf, tfscale
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfscale.ScaleStrategy(wire="int8")
with strategy.scope():
    model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.default_rng(0).standard_normal([64, 64])
history = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0).history["loss"]
assert history[-1] < history[0], history
print(tfscale.__file__)
"""

TYPED = """
import tfscale
reveal_type(tfscale.ScaleStrategy)
tfscale.collectives.ring("two")
"""


@pytest.fixture(scope="module")
def stranger(packages, fresh):
    """The wheel alone, beside this environment's TensorFlow."""
    import tensorflow

    environment = fresh("stranger")
    environment.install("--no-deps", "--no-index", packages.wheel)
    environment.borrow(tensorflow)
    return environment


def test_nothing_of_the_checkout_is_imported(stranger):
    places = stranger.run(
        "python", "-c", "import tfscale, tfscale.ops, tfscale.callbacks, sys\n"
        "ours = [m for name, m in sys.modules.items() if name.startswith('tfscale')]\n"
        "print(*{module.__file__ for module in ours}, sep='\\n')",
    ).splitlines()  # fmt: skip
    assert len(places) > 20
    assert not [place for place in places if not place.startswith(str(stranger.folder))]


def test_the_command_is_there(stranger):
    assert "launch" in stranger.run("tfscale", "--help")


def test_importing_tfscale_imports_none_of_what_takes_long(stranger):
    """TensorFlow's import takes seconds; whoever only asks for the version does not wait for it."""
    loaded = stranger.run(
        "python", "-c", "import sys; before = {*sys.modules}\nimport tfscale\n"
        "print(*{n.partition('.')[0] for n in {*sys.modules} - before})",
    ).split()  # fmt: skip
    assert "tfscale" in loaded
    slow = {"tensorflow", "keras", "numpy", "rich", "h5py", "matplotlib", "asyncio", "subprocess"}
    assert not slow & {*loaded}


def test_its_sources_are_those_of_the_checkout(stranger):
    """The package finds the library that the checkout has built and tested."""
    from tfscale.native import build

    found = stranger.run(
        "python", "-c", "from tfscale.ops import build; print(build.find_or_build())"
    )
    assert found.strip() == str(build.find_or_build())


def test_mypy_sees_the_types(stranger):
    (stranger.folder / "empty" / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--python-executable", stranger.python, "typed.py"]
    said = subprocess.run(
        [*command, "--cache-dir", os.devnull], cwd=stranger.folder / "empty",
        capture_output=True, text=True, timeout=500,
    ).stdout  # fmt: skip
    assert "missing library stubs or py.typed" not in said
    assert "def (algorithm: str | " in said and "-> tfscale.strategy." in said, said
    assert 'incompatible type "str"; expected "int"' in said, said


@pytest.mark.full
@pytest.mark.parametrize("package", ["wheel", "source"])
def test_a_stranger_installs_builds_and_trains(packages, fresh, package, tmp_path):
    """Install from the package index, with a TensorFlow of its own and an empty cache."""
    environment = fresh(package)
    environment.install(f"{getattr(packages, package)}[cpu]")
    built = {"TFSCALE_CACHE": str(tmp_path / "cache"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    told = environment.run("python", "-c", PROGRAM, **built).strip()
    assert told.startswith(str(environment.folder))
    assert list((tmp_path / "cache").rglob("libtfscale*.so"))
    shutil.rmtree(environment.folder)
