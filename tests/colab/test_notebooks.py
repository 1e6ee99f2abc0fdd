"""Each notebook runs from top to bottom, without an edit, and shows no error and no warning."""

import re

import nbformat
import pytest

pytest.importorskip("nbclient")

from tests.colab.notebooks import (
    COLAB,
    NOTEBOOKS,
    SECONDS,
    code_cells,
    complaints,
    pictures,
    read,
    run,
)

QUICK = ("1_quick_start", "2_all_reduce_seen", "7_telemetry")
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert {*QUICK} <= {path.stem for path in NOTEBOOKS}


@each
def test_git_holds_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == [] and cell.execution_count is None, "python -m tests.colab"


@each
def test_all_begin_with_the_same_cell(path):
    """The cell finds out where it runs; whoever edits it must edit all notebooks."""
    first, *_ = code_cells(read(path))
    assert first.source == code_cells(read(NOTEBOOKS[0]))[0].source
    assert first.source.count("REPOSITORY = ") == 1


def test_a_tensorflow_that_is_too_old_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr("tensorflow.__version__", "2.19.1")
    with pytest.raises(
        RuntimeError, match=r"needs TensorFlow 2\.20 or newer, and here is 2\.19\.1"
    ):
        exec(code_cells(read(NOTEBOOKS[0]))[0].source, {})


def test_where_tfscale_is_missing_it_says_what_to_put_where(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="Put its wheel .* beside this notebook"):
        exec(code_cells(read(NOTEBOOKS[0]))[0].source, {})


@each
def test_links_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (COLAB / link).exists(), link


@pytest.mark.one_in(3)
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in QUICK else pytest.mark.full, id=path.stem)
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path, tmp_path):
    notebook = run(path, tmp_path)
    assert not list(complaints(notebook))
    assert pictures(notebook), "a notebook without a picture"
