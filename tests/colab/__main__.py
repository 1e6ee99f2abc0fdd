"""``python -m tests.colab`` clears all notebooks of outputs.

``python -m tests.colab FOLDER [NAME...]`` runs them, and writes their pictures and what they print
to that folder, to be looked at.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.colab.notebooks import NOTEBOOKS, clear, code_cells, complaints, pictures, run


def printed(notebook):
    return "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "") + "\n"
        for cell in code_cells(notebook)
        for output in cell.outputs
    )


def show(path, folder):
    """Run one notebook, and leave its outputs in the folder."""
    begun = time.monotonic()
    notebook = run(path, folder)
    (folder / f"{path.stem}.txt").write_text(printed(notebook))
    for number, picture in enumerate(pictures(notebook)):
        (folder / f"{path.stem}-{number}.png").write_bytes(picture)
    print(f"{path.name}: {time.monotonic() - begun:.0f} s", *complaints(notebook), sep="\n  ")


def main():
    if len(sys.argv) == 1:
        for path in NOTEBOOKS:
            clear(path)
        return
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            show(path, folder)


if __name__ == "__main__":
    main()
