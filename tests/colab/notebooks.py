"""The notebooks of ``colab/``: found, kept free of outputs, and run as a reader runs them."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

COLAB = Path(__file__).parents[2] / "colab"
NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
SECONDS = 1200  # for a cell, on the busiest machine


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def clear(path: Path) -> None:
    """Remove what running has left, so that git shows only what somebody wrote."""
    notebook = read(path)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count, cell.metadata = [], None, {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, path)


def run(path: Path, folder: Path, python: Path | None = None) -> Any:
    """The notebook with its outputs; an error in a cell is raised.

    Args:
        path: path of the notebook.
        folder: where it runs.
        python: the interpreter of its kernel; this one by default.
    """
    notebook, kernel = read(path), AsyncKernelManager(kernel_name="python3")
    if python is not None:
        kernel.kernel_spec.argv[0] = str(python)
    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, km=kernel, timeout=SECONDS, resources=place).execute()


def complaints(notebook: Any) -> Iterator[str]:
    """Return warnings, and lines on stderr that are not tfscale's messages."""
    for cell in code_cells(notebook):
        for output in cell.outputs:
            for line in output.get("text", "").splitlines():
                foreign = output.name == "stderr" and not line.startswith("tfscale: ")
                if foreign or re.search(r"\bwarning\b", line, re.IGNORECASE):
                    yield line


def pictures(notebook: Any) -> list[bytes]:
    """All PNGs that it shows."""
    found = (o.get("data", {}).get("image/png") for c in code_cells(notebook) for o in c.outputs)
    return [base64.b64decode(picture) for picture in found if picture]
