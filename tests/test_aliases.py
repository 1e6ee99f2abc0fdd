"""Short names of packages give the same modules as the long ones."""

import importlib
import subprocess
import sys

import pytest

import tfscale
from tfscale.support.aliases import Aliases


@pytest.mark.parametrize("short, home", tfscale._PACKAGES.items())
def test_both_names_give_one_module(short, home):
    module = importlib.import_module(home)
    assert importlib.import_module(short) is module
    assert module.__spec__.name == module.__name__ == home


def test_modules_in_a_package_are_loaded_once():
    from tfscale.optimizers.lamb import LAMB
    from tfscale.training.optimizers import lamb

    assert lamb.LAMB is LAMB is tfscale.optimizers.LAMB


def test_a_short_name_comes_first_in_a_fresh_process():
    program = (
        "import tfscale.schedules.curves as short; import tfscale; "
        "import tfscale.training.schedules.curves as long; "
        "assert short is long and tfscale.schedules.curves is long; import importlib; "
        "importlib.reload(tfscale.schedules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"tfscale\.training\.optimizers\.adam"):
        importlib.import_module("tfscale.optimizers.adam")


def test_other_names_are_left_to_python():
    assert Aliases({"tfscale.a": "tfscale.b"}).find_spec("tfscale.ab") is None
