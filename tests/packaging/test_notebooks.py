"""A notebook beside a wheel installs it by its first cell, and runs, with no checkout in reach."""

import shutil

import pytest

pytest.importorskip("nbclient")

from tests.colab.notebooks import COLAB, SECONDS, complaints, run

QUICK_START = COLAB / "1_quick_start.ipynb"


@pytest.mark.full
@pytest.mark.timeout(2 * SECONDS)
def test_a_notebook_installs_the_wheel_beside_it(packages, fresh):
    import ipykernel
    import pip
    import sklearn
    import tensorflow

    environment = fresh("notebook")
    environment.borrow(ipykernel, pip, sklearn, tensorflow)
    beside = environment.folder / "empty"
    shutil.copy(packages.wheel, beside)
    notebook = run(QUICK_START, beside, environment.python)
    assert not list(complaints(notebook))
    (version,) = [cell for cell in notebook.cells if "REPOSITORY = " in cell.source]
    assert "tfscale" in version.outputs[0].text
    assert environment.run("python", "-c", "import tfscale; print(tfscale.__file__)").startswith(
        str(environment.folder)
    )
