"""Files that ``make`` leaves alone."""

import os
import subprocess

import pytest

from tests.helpers import ROOT


def make(*words):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "-C", ROOT, *words], env=own, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def environment(tmp_path):
    """Somebody's environment, whose Python notes what it is asked for."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    python.chmod(0o755)
    (python.parent / "pip").symlink_to("python")
    return tmp_path


def test_nothing_is_installed_into_an_environment_outside_of_the_checkout(environment):
    ran = make("docs", f"VENV={environment}")
    assert ran.returncode == 0, ran.stderr
    assert "is outside of this checkout: make uses it as it is and installs nothing" in ran.stdout
    (asked,) = (environment / "asked").read_text().splitlines()
    assert asked.startswith("-m sphinx")
    assert sorted(path.name for path in environment.iterdir()) == ["asked", "bin"]


def test_an_environment_outside_of_the_checkout_is_not_made(tmp_path):
    ran = make("docs", f"VENV={tmp_path / 'nowhere'}")
    assert ran.returncode != 0
    assert "make that environment yourself, or leave VENV out" in ran.stderr
    assert not list(tmp_path.iterdir())
