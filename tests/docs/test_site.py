"""The site of docs/: no broken link, a whole reference, and nothing that comes from elsewhere."""

import re
import subprocess
import sys
import zlib

import pytest
from helpers import ROOT

import tfscale
from tests.docs.test_docstrings import PACKAGES

SECONDS = 500  # many times what it takes


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as ``make docs`` does: each warning is an error."""
    pytest.importorskip("furo", reason="the site needs the packages of the extra 'docs'")
    folder = tmp_path_factory.mktemp("site")
    options = ["-W", "--keep-going", "-q", "-c", ROOT / "docs" / "site", "-d", folder / "state"]
    ran = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", folder / "html"],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return folder / "html"


def test_all_that_is_public_is_in_the_reference(site):
    *_, names = (site / "objects.inv").read_bytes().split(b"\n", 4)
    found = {line.split()[0] for line in zlib.decompress(names).decode().splitlines()}
    pages = {page.stem for page in (ROOT / "docs" / "reference").glob("*.rst")}
    shown = [package for package in PACKAGES if package.__name__ in pages]
    packages = {package.__name__ for package in PACKAGES}
    assert {f"tfscale.{name}" for name in tfscale.__all__} & packages <= pages
    public = {f"{package.__name__}.{name}" for package in shown for name in package.__all__}
    constants = {name for name in public if name.rpartition(".")[2].isupper()}
    assert not public - found - constants - pages - {"tfscale.__version__"}


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in [*pages, *site.rglob("*.css")]:
        text = page.read_text()
        loaded = re.findall(
            r'<(?:script|img|iframe|link)\b[^>]*?(?:src|href)="(\w+:)?//[^"]*"', text
        )
        assert not loaded and not re.search(r"url\([\"']?https?:|@import", text), page


def test_pages_have_no_formula_that_was_left_as_it_was_written(site):
    for page in site.rglob("*.html"):
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        assert not re.search(r"\\(?:frac|sum|eta|lambda|begin)\b", prose), page


def test_links_of_the_readme_lead_somewhere(site):
    links = re.findall(r"\]\(([^):]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    for path, _, anchor in (link.partition("#") for link in links):
        assert (ROOT / path).exists(), path
        page = site / path.removeprefix("docs/").replace(".md", ".html")
        assert not anchor or f'id="{anchor}"' in page.read_text(), (path, anchor)
