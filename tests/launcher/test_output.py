"""Output of a terminal: lines with their ranks, and bars that nothing tears."""

import io

import pytest

from tfscale.tools.launch.output import Screen


class Terminal:
    """Enough of one to know what is to be seen: carriage returns, and two codes."""

    def __init__(self):
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text):
        while text:
            if text.startswith("\x1b[J"):
                self.lines = [*self.lines[: self.row], self.lines[self.row][: self.column]]
                text = text[3:]
            elif text.startswith("\x1b["):
                number, _, text = text[2:].partition("A")
                self.row -= int(number)
            else:
                self._one(text[0])
                text = text[1:]

    def _one(self, character):
        if character == "\n":
            self.row, self.column = self.row + 1, 0
            self.lines += [""] * (self.row + 1 - len(self.lines))
        elif character == "\r":
            self.column = 0
        else:
            line = self.lines[self.row]
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def flush(self):
        pass

    def isatty(self):
        return True

    @property
    def shown(self):
        return [line for line in self.lines if line]


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def file():
    return io.StringIO()


def bar(text):
    return "\b" * 20 + "\r" + text


def test_lines_come_whole_with_their_ranks(file):
    screen = Screen(12, out=file, err=file)
    screen.heard(3, "half a", file)
    screen.heard(11, "another\n", file)
    screen.heard(3, " line\nand", file)
    screen.ended(3)
    screen.ended(11)
    assert file.getvalue() == "[11] another\n[ 3] half a line\n[ 3] and\n"


def test_no_prefix(file):
    screen = Screen(2, out=file, err=file, prefix=False)
    screen.heard(1, "a line\n", file)
    assert file.getvalue() == "a line\n"


def test_a_file_gets_bars_of_rank_0_once_they_are_complete(file):
    screen = Screen(2, out=file, err=file)
    for i in range(3):
        for rank in (0, 1):
            screen.heard(rank, bar(f"{i}/2 of {rank}"), file)
    for rank in (0, 1):
        screen.heard(rank, "\n", file)
    assert file.getvalue() == "[0] 2/2 of 0\n"


def test_a_bar_stays_below_what_others_print(terminal):
    screen = Screen(2, out=terminal, err=terminal, colours=False)
    screen.heard(0, bar("1/2"), terminal)
    screen.heard(1, "warning\n", terminal)
    assert terminal.shown == ["[1] warning", "[0] 1/2"]
    screen.heard(0, bar("2/2"), terminal)
    screen.heard(1, bar("not shown"), terminal)
    assert terminal.shown == ["[1] warning", "[0] 2/2"]
    screen.heard(0, "\nEpoch 2\n", terminal)
    screen.say("words")
    assert terminal.shown == ["[1] warning", "[0] 2/2", "[0] Epoch 2", "tfscale launch: words"]


def test_lines_that_end_with_a_carriage_return(terminal):
    """Print lines as ``print(..., end="\\r")`` does."""
    screen = Screen(2, out=terminal, err=terminal, colours=False)
    for i in range(5):
        screen.heard(0, f"step {i}\r", terminal)
        screen.heard(1, f"step {i}\r", terminal)
        assert terminal.shown == [f"[0] step {i}"]
    screen.heard(0, "done  \n", terminal)
    assert terminal.shown == ["[0] done"]


def test_a_spinner(terminal):
    screen = Screen(1, out=terminal, err=terminal, colours=False)
    for sign in "|/-\\|":
        screen.heard(0, f"{sign}\b", terminal)
        assert terminal.shown == [f"[0] {sign}"]
    screen.heard(0, "ok\n", terminal)
    assert terminal.shown == ["[0] ok"]


def test_lines_of_windows_are_no_bars(file):
    screen = Screen(2, out=file, err=file)
    screen.heard(1, "a\r\nb\r\n", file)
    assert file.getvalue() == "[1] a\n[1] b\n"


def test_all_bars(terminal):
    screen = Screen(3, out=terminal, err=terminal, colours=False, all_bars=True)
    for rank in (2, 0, 1):
        screen.heard(rank, bar(f"1/2 of {rank}"), terminal)
    screen.heard(1, bar("2/2 of 1"), terminal)
    assert terminal.shown == ["[0] 1/2 of 0", "[1] 2/2 of 1", "[2] 1/2 of 2"]
    screen.heard(1, "\n", terminal)
    assert terminal.shown == ["[1] 2/2 of 1", "[0] 1/2 of 0", "[2] 1/2 of 2"]
    screen.heard(2, "\nEpoch 2/2\n", terminal)
    assert "[2] Epoch 2/2" in terminal.shown


def test_the_header_of_a_bar_goes_with_it(file):
    screen = Screen(2, out=file, err=file)
    for rank in (0, 1):
        screen.heard(rank, "Epoch 1/2\n", file)
        screen.heard(rank, bar("2/2") + "\n", file)
        screen.heard(rank, "Epoch 2/2\n", file)
        screen.heard(rank, f"a line of {rank}\n", file)  # verbose=2 draws no bar
    assert file.getvalue().splitlines() == [
        "[0] Epoch 1/2",
        "[0] 2/2",
        "[0] Epoch 2/2",
        "[0] a line of 0",
        "[1] Epoch 2/2",
        "[1] a line of 1",
    ]


NOISE = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795670794.743976   21210 port.cc:153] oneDNN custom operations are on. You may see
"""
WARNING = "W0000 00:00:1795670794.743976   21210 log.cc:1] bucket 'x' has waited 5 s for rank 1"


@pytest.mark.parametrize(("level", "shown"), [("2", 0), ("0", 2)])
def test_what_tensorflow_logs_while_it_is_imported(file, monkeypatch, level, shown):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    screen = Screen(2, out=file, err=file)
    screen.heard(0, f"{NOISE}{WARNING}\nmine\n", file)
    *noise, warning, mine = file.getvalue().splitlines()
    assert len(noise) == len(screen.last(0)) - 2 == shown
    assert (warning, mine) == (f"[0] {WARNING}", "[0] mine")


def test_a_header_waits_for_a_line_of_its_own_stream(file):
    errors = io.StringIO()
    screen = Screen(2, out=file, err=errors)
    screen.heard(1, "Epoch 1/2\n", file)
    screen.heard(1, "warning\n", errors)
    assert errors.getvalue() == "[1] warning\n" and not file.getvalue()
    screen.ended(1)
    assert file.getvalue() == "[1] Epoch 1/2\n"


def test_a_bar_is_cut_where_the_terminal_ends(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    screen = Screen(1, out=terminal, err=terminal, colours=False)
    screen.heard(0, bar("0123456789"), terminal)
    assert terminal.shown == ["[0] 01234"]


def test_an_error_beside_a_bar_is_not_lost(file):
    errors = io.StringIO()
    screen = Screen(2, out=file, err=errors)
    screen.heard(1, bar("1/2"), file)
    screen.heard(1, "Traceback\nValueError\n", errors)
    screen.ended(1)
    assert errors.getvalue() == "[1] Traceback\n[1] ValueError\n"
    assert screen.last(1) == ["Traceback", "ValueError"]


def test_a_line_without_an_end_does_not_take_all_memory(file):
    screen = Screen(1, out=file, err=file)
    for _ in range(100):
        screen.heard(0, "x" * 100_000, file)
    assert file.getvalue().count("\n") >= 8
