"""The packages that are handed out, and empty environments that they are installed into."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import ROOT

SECONDS = 500


@pytest.fixture(scope="session")
def copy_of_checkout(tmp_path_factory):
    """Copy the files that packaging needs, so that it leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("tfscale", "custom_ops"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.o")
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    return copy


@dataclass(frozen=True)
class Packages:
    """Results of ``python -m build``: a source package, and a wheel from that."""

    source: Path
    wheel: Path


def build_packages(checkout, out, *options, **environment):
    """The finished process of ``python -m build``."""
    pytest.importorskip("build")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, *options]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="session")
def packages(copy_of_checkout, tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    done = build_packages(copy_of_checkout, made)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    return Packages(source, wheel)


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and a folder to be in that holds nothing."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    def install(self, *what):
        """Install by this environment's pip, into the other environment."""
        command = [sys.executable, "-m", "pip", "--python", self.python, "install", *what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    def borrow(self, *modules):
        """Use packages of the environment that runs the tests; what it has of tfscale stays out:
        a line of a ``.pth`` file adds a folder, and not what that folder's own ``.pth`` files say.
        """
        places = {str(Path(module.__file__).parents[1]) for module in modules}
        (packages,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        (packages / "borrowed.pth").write_text("\n".join(sorted(places)) + "\n")

    def run(self, *words, seconds=SECONDS, **environment):
        """The output of a command of this environment; it must end well."""
        done = self.try_to_run(*words, seconds=seconds, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_to_run(self, *words, seconds=SECONDS, **environment):
        """The finished process of a command of this environment."""
        command = [self.folder / "venv" / "bin" / words[0], *words[1:]]
        elsewhere = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TFSCALE"))}
        return subprocess.run(
            command, cwd=self.folder / "empty", env=elsewhere | environment,
            capture_output=True, text=True, timeout=seconds,
        )  # fmt: skip


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Makes empty environments, by name."""

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        (folder / "empty").mkdir()
        command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
        subprocess.run(command, check=True, timeout=SECONDS)
        return Environment(folder)

    return make
