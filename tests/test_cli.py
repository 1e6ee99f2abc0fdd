"""``tfscale`` as somebody calls it who does not know its commands yet."""

import pytest

from tests.helpers import ROOT
from tfscale.tools import bench, cli


def printed(capsys, *words):
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    return status, *capsys.readouterr()


def test_alone_it_prints_help(capsys):
    status, out, err = printed(capsys)
    assert (status, err) == (0, "")
    assert printed(capsys, "--help") == (0, out, "")
    assert all(f"    {command} " in out for command in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["lanch", "-n", "2"], "launch"),
        (["docter"], "doctor"),
        (["bench", "convergance"], "convergence"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_one_that_was_meant(words, meant, capsys):
    status, out, err = printed(capsys, *words)
    assert (status, out) == (2, "")
    assert f"Did you mean '{meant}'?" in err
    assert len(err.splitlines()) == 2


def test_a_word_like_no_command_is_answered_with_all(capsys):
    status, _, err = printed(capsys, "bench", "xyz")
    assert status == 2 and "Did you mean" not in err
    assert all(name in err for name in bench.BENCHES)


def test_help_of_bench_has_a_line_for_each(capsys):
    status, out, _ = printed(capsys, "bench", "--help")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == [
        *bench.BENCHES
    ]
    assert max(map(len, out.splitlines())) <= 80


def test_each_bench_is_on_the_page_of_commands():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert not [name for name in bench.BENCHES if f"`tfscale bench {name}`" not in page]


@pytest.mark.parametrize("name", bench.BENCHES)
def test_each_bench_has_options(name, capsys):
    status, out, _ = printed(capsys, "bench", name, "--help")
    assert status == 0 and f"usage: tfscale bench {name}" in out
