"""Files that the native library's build compiles together, and that it compiles again."""

import re

import pytest

from tests.helpers import ROOT
from tfscale.native import toolchain, units

TREE = {
    "wire/sizes.h": "",
    "wire/numbers.h": '#include "custom_ops/wire/sizes.h"\n',
    "wire/codec.cc": '#include "custom_ops/wire/numbers.h"\n',
    "wire/loops.inc": "",
    "wire/levels.cc": '  #  include "loops.inc"\n// #include "custom_ops/wire/sizes.h"\n',
    "kernels/inputs.h": '#include "tensorflow/core/op.h"\n#include "custom_ops/wire/sizes.h"\n',
    "kernels/log.cc": '#include "custom_ops/kernels/inputs.h"\n',
    "kernels/flight.cc": '#include <string>\n#include "absl/status/status.h"\n',
    "kernels/signal.cc": "#include <csignal>\n",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        file = tmp_path / "custom_ops" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return toolchain.find_sources(tmp_path)


def test_what_includes_tensorflow_is_one_unit_and_comes_first(tree):
    first, *others = units.find_units(tree)
    assert first.files == ("custom_ops/kernels/flight.cc", "custom_ops/kernels/log.cc")
    assert first.uses_tensorflow and not any(unit.uses_tensorflow for unit in others)
    assert [unit.files for unit in others] == [
        ("custom_ops/kernels/signal.cc",),
        ("custom_ops/wire/codec.cc",),
        ("custom_ops/wire/levels.cc",),
    ]


def test_a_unit_knows_its_headers_direct_and_indirect(tree):
    headers = {unit.name: unit.headers for unit in units.find_units(tree)}
    assert headers == {
        "tensorflow.cc": ("custom_ops/kernels/inputs.h", "custom_ops/wire/sizes.h"),
        "custom_ops/kernels/signal.cc": (),
        "custom_ops/wire/codec.cc": ("custom_ops/wire/numbers.h", "custom_ops/wire/sizes.h"),
        "custom_ops/wire/levels.cc": ("custom_ops/wire/loops.inc",),
    }


def test_only_what_is_generated_is_written(tree):
    found = units.find_units(tree)
    units.write_generated(found, tree.root)
    assert (tree.root / "tensorflow.cc").read_text() == (
        '#include "custom_ops/kernels/flight.cc"\n#include "custom_ops/kernels/log.cc"\n'
    )
    assert (tree.root / "custom_ops/wire/codec.cc").read_text() == TREE["wire/codec.cc"]


def test_every_include_of_the_sources_is_understood():
    """An include that ``find_units`` overlooks would leave an old object in use after an edit."""
    sources = toolchain.find_sources(ROOT)
    for unit in units.find_units(sources):
        for file in (*unit.files, *unit.headers):
            for line in re.findall(r"^\s*#\s*include.*", (ROOT / file).read_text(), re.MULTILINE):
                name = re.fullmatch(r'#include (?:<[\w./]+>|"([\w./]+)")(?: *//.*)?', line.strip())
                assert name, f"{file}: {line}"
                quoted = name[1] or ""
                assert (
                    not quoted
                    or quoted in unit.headers
                    or (unit.uses_tensorflow and quoted.startswith(units.OF_TENSORFLOW))
                ), f"{file}: {line}"
