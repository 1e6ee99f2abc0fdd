"""The files, functions and rooms that docs/architecture.md and docs/files.md name exist."""

import re
import sys

import pytest
from helpers import ROOT

PAGES = ("architecture.md", "files.md", "engine.md", "where.md", "contributing.md")


@pytest.fixture(scope="module")
def house():
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "docs" / "images"))
    try:
        import house

        yield house
    finally:
        sys.path.remove(str(ROOT / "docs" / "images"))


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`((?:tfscale|custom_ops|tests|docs|colab)/[\w./]*)`", text))
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", ["files.md", "engine.md"])
def test_files_of_tables_exist(page):
    folder, missing, seen = None, [], 0
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if head := re.match(r"\| file in `([\w/]+)`", line):
            folder = ROOT / head[1]
        elif folder and line.startswith("| `"):
            names = re.findall(r"`([\w.]+)`", line.split("|")[1])
            seen += len(names)
            missing += [folder / name for name in names if not (folder / name).exists()]
        elif not line.startswith("|"):
            folder = None
    assert seen > 10
    assert not missing


def test_a_gradient_passes_functions_that_exist(house):
    for station in house.stations():
        text = (ROOT / station.file).read_text()
        assert re.search(rf"(def |::|\b){station.function}\(", text), station
        assert station.noun in house.NOUNS, station


def test_the_table_of_rooms_is_whole(house):
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("| room | question |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == house.rooms()


def test_the_picture_of_rooms_shows_each_room_once(house):
    figure = house.draw_rooms()
    assert (
        sorted(text.get_text() for text in figure.axes[0].texts if text.get_text()) == house.rooms()
    )
