"""Facts about wires are the same in Python, in C++ and in the documents."""

import math
import re
from pathlib import Path

import pytest

from tfscale.collectives import wires
from tfscale.collectives.wires import FORMATS, Error

ROOT = Path(__file__).parent.parent
FACTS = (ROOT / "custom_ops/wire/facts.h").read_text()
PAGE = (ROOT / "docs/wires.md").read_text()
TABLE = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.split("\n\n")[2].splitlines()[2:]
]
LOSSY = [known for known in FORMATS.values() if not known.lossless]
WORDS = re.sub(r"\s+", " ", PAGE)


# -------------------------------------------------------------------------- C++


def number(text):
    return math.inf if text == "kNone" else float.fromhex(text) if "x" in text else float(text)


def native_error(text):
    return Error(*(number(part) for part in text.split(", ") if part))


def native_rows():
    row = r'\{Format::k(\w+), "(\w+)", (\d+), (\d), \{(.*?)\}(?:, \{(.*?)\})?\},\n'
    for _, name, bits, scale_bytes, nearest, stochastic in re.findall(row, FACTS):
        random = native_error(stochastic) if stochastic else None
        yield name, int(bits), int(scale_bytes), native_error(nearest), random


def test_python_and_native_code_know_the_same():
    def row(known):
        scale_bytes = wires.nbytes(known.name, wires.BLOCK) - wires.BLOCK * known.bits // 8
        return known.name, known.bits, scale_bytes, known.nearest, known.stochastic

    assert list(native_rows()) == [row(known) for known in FORMATS.values()]
    assert f"kBlock = {wires.BLOCK};" in FACTS


# -------------------------------------------------------------------- documents


def power(number):
    """Powers of two as in 2⁻¹²⁷; other numbers, and 2 itself, in digits."""
    exponent = math.log2(number)
    if number == 2 or not exponent.is_integer():
        return f"{number:g}"
    return "2" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def share(of, divisor):
    return of if divisor == 1 else f"{of} / {power(divisor)}"


def largest_error(error):
    given = []
    if error.of_number < math.inf:
        given.append(share(r"\|x\|", error.of_number))
    if error.of_block < math.inf:
        given.append(share("A", error.of_block))
    if error.of_number < math.inf:  # of the others, a sentence below the table tells
        given.append(power(error.least))
    return ", or ".join(given)


def largest_errors(known):
    random = f" (stochastic: {largest_error(known.stochastic)})" if known.stochastic else ""
    return largest_error(known.nearest) + random


def bytes_for_n(known):
    numbers = {16: "2n", 8: "n"}.get(known.bits, f"⌈n/{8 // known.bits}⌉")
    return f"{numbers} + 4b" if known.block else numbers


def listed(names):
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}" if first else last


def test_the_page_has_a_row_for_each_wire():
    assert [row[0] for row in TABLE] == [f"`{name}`" for name in FORMATS]
    assert [row[1].startswith("32 ") for row in TABLE] == [w.lossless for w in FORMATS.values()]


@pytest.mark.parametrize("known", LOSSY, ids=lambda known: known.name)
def test_a_row_of_the_page_is_one_of_the_table(known):
    (row,) = [row for row in TABLE if row[0] == f"`{known.name}`"]
    bits = known.bits + (32 / known.block if known.block else 0)
    assert row[1:4] == [f"{bits:g}", bytes_for_n(known), largest_errors(known)]
    assert ("stochastic" in row[4]) == (known.stochastic is not None)
    assert not known.feedback or "error feedback" in row[5]


def test_sentences_of_the_page_say_what_the_table_says():
    def names(holds):
        return listed(known.name for known in LOSSY if holds(known))

    (grid,) = {w.nearest.least for w in LOSSY if w.nearest.of_floats < math.inf}
    (floats,) = {w.nearest.of_floats for w in LOSSY} - {math.inf}
    sign = FORMATS["sign"].nearest.least
    inexact = names(lambda known: known.nearest.of_floats < math.inf)
    sentences = [
        f"*b* = ⌈n / {wires.BLOCK}⌉ blocks",
        f"{inexact} add {power(1 / floats)} A for float rounding, "
        f"and turn blocks with A < {power(grid)} into zeros.",
        f"`sign` sends the block's mean |x|, and zeros where that is below {power(sign)}.",
        f"{names(lambda known: known.stochastic is None)} do not have it and ignore the request.",
        f"{names(lambda known: known.at_random)} rounds stochastically by default, "
        "but not with error feedback",
    ]
    assert [sentence for sentence in sentences if sentence not in WORDS] == []


def test_the_strategy_names_all_wires():
    text = re.sub(r"\s+", " ", (ROOT / "tfscale/strategy/strategy.py").read_text())
    names = ", ".join(f'``"{name}"``' for name in FORMATS)
    assert f"a name ({names})" in text
