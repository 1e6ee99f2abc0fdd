"""The package as a newcomer meets it: what it lists, what it says, what it needs."""

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

import tfscale
import tfscale.ops
from tests.helpers import ROOT
from tfscale.support.sizes import number_of_bytes


def python(code):
    """The process after running some lines without the tests' set-up."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


@pytest.mark.parametrize("module", [tfscale, tfscale.ops])
def test_dir_lists_what_there_is(module):
    assert sorted(dir(module)) == sorted(module.__all__)


def test_what_dir_lists_is_there():
    for name in dir(tfscale):
        getattr(tfscale, name)


@pytest.mark.parametrize(
    "use",
    [
        "tfscale.ScaleStrategy()",
        "tfscale.optimizers.LAMB()",
        "import tfscale.callbacks",
        "from tfscale.schedules import Cosine",
        "import tfscale.ops; tfscale.ops.Group.local()",
    ],
)
def test_without_tensorflow_it_says_what_to_install(use):
    """Import without TensorFlow, as ``tfscale doctor`` does."""
    ran = python(f"import sys; sys.modules['tensorflow'] = None\nimport tfscale\n{use}")
    words = ran.stderr.splitlines()
    (first,) = [n for n, line in enumerate(words) if line.startswith("ImportError: ")]
    assert "ImportError: TensorFlow cannot be imported by" in words[first]
    assert "  pip install tensorflow-cpu           (for CPUs only, x86-64)" in words[first:]


SAYS = "import logging, tfscale\nlogging.getLogger('tfscale').{}('seen')"


def test_messages_go_to_stderr_until_the_program_sets_up_logging():
    assert python(SAYS.format("info")).stderr == "tfscale: seen\n"
    assert python(SAYS.format("warning")).stderr == "tfscale: warning: seen\n"
    set_up = "import logging; logging.basicConfig(format='%(name)s/%(message)s')\n"
    assert python(set_up + SAYS.format("warning")).stderr == "tfscale/seen\n"


def test_a_program_says_how_much_it_wants_to_hear():
    quiet = "import logging; logging.getLogger('tfscale').setLevel('ERROR')\n"
    assert python(quiet + SAYS.format("warning")).stderr == ""


def test_a_line_comes_in_one_piece():
    """Others write to the same stderr, and nothing holds lines together where it is unbuffered."""
    noted = """
import sys
class Stderr:
    def write(self, text):
        print(repr(text))
    def flush(self):
        pass
sys.stderr = Stderr()
"""
    assert python(noted + SAYS.format("info")).stdout == "'tfscale: seen\\n'\n"


def test_nobody_reads_stderr_any_more():
    ran = python("import sys; sys.stderr.close()\n" + SAYS.format("warning") + "\nprint('on')")
    assert ran.stdout == "on\n"


def test_there_is_one_logger():
    said = [name for name in logging.root.manager.loggerDict if name.startswith("tfscale")]
    assert said == ["tfscale"]


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1, 1), (2.5e6, 2_500_000), ("7", 7), ("7 bytes", 7), ("25MB", 25_000_000), ("1 kb", 1000),
        ("1.5 GB", 1_500_000_000), ("1KiB", 1024), ("2 MiB", 2 * 2**20), ("1gib", 2**30),
        ("3M", 3_000_000), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_numbers_of_bytes(written, size):
    assert number_of_bytes(written, "budget") == size


@pytest.mark.parametrize(
    "written", [0, -1, 0.5, "", "MB", "1iB", "1e6MB", "-1MB", "0 MB", "1 XB", True, None, "1.2.3",
                float("nan"), float("inf"), [1]]
)  # fmt: skip
def test_other_words_are_refused_with_what_was_received(written):
    with pytest.raises(ValueError, match="budget is a number of bytes, 1 or more") as told:
        number_of_bytes(written, "budget")
    assert f"got {written!r}" in str(told.value)


PROGRESS = """
import logging, tfscale
from tfscale.support.messages import Progress
say = logging.getLogger("tfscale").info
with Progress("made {} of {} things", 8, say) as progress:
    for step in range(8):
        progress.advance(1)
        if step == 2:
            say("meanwhile")
say("ready")
"""


def on_terminal(code):
    """Return the output of a program on stderr if that is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", code], stderr=theirs, cwd=ROOT) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # when the last writer has closed the terminal
            while piece := os.read(ours, 4096):
                written += piece
        os.close(ours)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


def test_progress_is_one_line_of_a_terminal_that_is_drawn_anew():
    written = on_terminal(PROGRESS)
    assert written.count("\n") == 2  # "meanwhile" and "ready"
    drawn = [line.removeprefix("tfscale: ") for line in re.split("\r\x1b\\[K|\n", written)]
    steps = [f"made {done} of 8 things" for done in range(9)]
    assert drawn == [*steps[:4], "meanwhile", *steps[4:], "ready", ""]


def test_progress_is_a_few_lines_elsewhere():
    quarters = [f"made {done} of 8 things" for done in (2, 4, 6)]
    lines = [*quarters[:1], "meanwhile", *quarters[1:], "ready"]
    assert python(PROGRESS).stderr.splitlines() == [f"tfscale: {line}" for line in lines]


def test_progress_is_lines_for_the_handlers_of_a_program_that_has_set_up_logging():
    set_up = "import logging; logging.basicConfig(format='%(name)s/%(message)s')"
    lines = on_terminal(set_up + PROGRESS).splitlines()
    assert lines[:2] == ["tfscale/made 2 of 8 things", "tfscale/meanwhile"] and len(lines) == 5


@pytest.mark.parametrize(
    "first",
    [
        "import logging; logging.getLogger('tfscale').setLevel('WARNING')",
        "import sys; sys.stderr = None",
    ],
    ids=["warnings alone", "no stderr"],
)
def test_progress_is_not_drawn_for_whoever_sees_no_messages(first):
    assert on_terminal(first + PROGRESS) == ""
