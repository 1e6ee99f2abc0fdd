"""Workers meet before TensorFlow starts: real processes and sockets, wrong in every way."""

import contextlib
import json
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.launch.processes import PATIENCE, free_ports, processes, squatter
from tfscale.cluster.addresses import split

WORKER = str(Path(__file__).parent / "workers" / "meet.py")


@pytest.fixture
def begin():
    with processes() as start:

        def begin(addresses, me, timeout=PATIENCE):
            return start(WORKER, json.dumps(addresses), str(me), str(timeout))

        yield begin


@pytest.fixture
def free():
    return lambda count: [f"127.0.0.1:{port}" for port in free_ports(count)]


def test_all_meet_and_leave_their_ports_free(begin, free):
    addresses = free(5)
    for output in [one.end() for one in [begin(addresses, i) for i in range(5)]]:
        assert "MET" in output, output
    for address in addresses:
        socket.create_server(split(address)).close()


def test_one_that_is_late_is_named_and_then_met_at_once(begin, free):
    addresses = free(3)
    first = [begin(addresses, i) for i in (0, 1)]
    for i, one in enumerate(first):
        line = one.until(r"(worker .*) has waited \S+ s for (.*)\n")
        assert line[1] == f"worker {i} at {addresses[i]}"
        assert line[2] == f"worker 2 at {addresses[2]} (nothing listens there)"
    time.sleep(1.5)  # by now they call rarely: the one that comes calls them
    last = begin(addresses, 2)
    (seconds,) = re.findall(r"MET after (\S+) s", last.end())
    print(f"MEASURED the last of three was met after {seconds} s")
    assert all("MET" in one.end() for one in first)


def test_one_that_never_comes_is_named_on_all(begin, free):
    addresses = free(4)
    for output in [one.end() for one in [begin(addresses, i, 2) for i in range(3)]]:
        (error,) = re.findall("^REFUSED (.*)$", output, re.MULTILINE)
        assert f"has waited 2 s for worker 3 at {addresses[3]} (nothing listens there). " in error
        assert "Check that each of them was started" in error
        assert "(join_timeout=2)" in error


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("no-such-host.invalid:1234", "its host name is not known here"),
        ("192.0.2.1:1234", r"no answer within|unreachable|nothing listens"),  # nobody has it
    ],
)
def test_an_address_that_leads_nowhere(begin, free, address, why):
    output = begin([*free(1), address], 0, 3).end()
    assert re.search(rf"for worker 1 at {re.escape(address)} \(.*({why})", output), output


def test_an_address_of_another_machine(begin, free):
    """Worker 1 is not where the list says: it can call, and cannot be called."""
    (here,) = free(1)
    addresses = [here, "192.0.2.1:1234"]
    both = [begin(addresses, i, 3) for i in (0, 1)]
    outputs = [one.end() for one in both]
    assert "worker 1 at 192.0.2.1:1234 (it has connected, but cannot be reached: " in outputs[0]
    assert "[192.0.2.1 is not an address of this machine; " in outputs[1]


def test_who_is_still_talking_at_the_end_is_cut_off_quietly(begin, free):
    """Python 3.11 prints a traceback for a server's task that is cancelled."""
    addresses = free(2)
    one = begin(addresses, 0, 1.5)
    one.until("BEGINS")
    with contextlib.ExitStack() as strangers:
        while one.process.poll() is None:
            with contextlib.suppress(OSError):  # not yet, or no more
                strangers.enter_context(socket.create_connection(split(addresses[0])))
            time.sleep(0.05)
    output = one.end()
    assert "REFUSED" in output, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("answer", [b"", b"\0\0\x12\4\0\0\0\0\0\0\3\x7f\xff\xff\xff\n"])
def test_a_port_that_another_program_has(begin, free, answer):
    """Silent, or like a server of gRPC; told on the worker that wants the port, and on others."""
    addresses = free(2)
    with squatter(split(addresses[1])[1], answer):
        outputs = [one.end() for one in [begin(addresses, i, 4) for i in (0, 1)]]
    own = r"worker 1 at \S+ \[its port cannot be opened: another program has it; (.*?)\]"
    what = "something answers" if answer else "it accepts connections, but sends nothing"
    assert any(what in why for why in re.findall(own, outputs[1]))
    assert re.search(rf"for worker 1 at \S+ \(it has connected, but cannot.*{what}", outputs[0])


def test_a_port_that_becomes_free(begin, free):
    addresses = free(2)
    with socket.create_server(split(addresses[1])):
        both = [begin(addresses, i) for i in (0, 1)]
        both[1].until("its port cannot be opened")
    assert all("MET" in one.end() for one in both)


def test_two_of_one_index(begin, free):
    addresses = free(3)
    first = begin(addresses, 0)
    first.until("has waited")
    for output in [one.end() for one in [first, begin(addresses, 1), begin(addresses, 1)]]:
        assert re.search(
            rf"REFUSED .*two processes were started as worker 1 at {addresses[1]}: process \d+ on "
            r"\S+, and process \d+ on \S+\. Start each worker once, each with its own index",
            output,
        ), output


def test_two_of_one_index_tell_those_whom_they_have_not_met(begin, free):
    """Worker 0 is slow: it has not said a word when they find each other."""
    addresses = free(3)
    with socket.create_server(split(addresses[0])) as slow:
        for _ in range(2):
            begin(addresses, 1)
        heard = ""
        while "two processes were started as worker 1" not in heard:
            talking, _ = slow.accept()
            talking.settimeout(PATIENCE)
            with talking, talking.makefile() as lines:
                talking.shutdown(socket.SHUT_WR)
                heard = lines.read()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (0, "two processes were started as worker 0 at {0}: process .*, and process 7 on mars"),
        (2, r"at the address of worker 1 at {1} runs worker 2 \(process 7 on mars\)\. Give each"),
    ],
)
def test_an_index_that_is_not_of_its_address(begin, free, place, said):
    """A worker of another machine that was given a wrong index looks like this."""
    addresses = free(3)
    workers = [[f"worker {i}", address] for i, address in enumerate(addresses)]
    hello = {"tfscale": 1, "place": place, "process": "process 7 on mars", "start": "ab"}
    with socket.create_server(split(addresses[1])) as other:
        one = begin(addresses, 0)
        talking, _ = other.accept()
        talking.sendall(json.dumps({**hello, "workers": workers}).encode() + b"\n")
        one.until("REFUSED " + said.format(*addresses))


@pytest.mark.parametrize("shortened", [2, 4])
def test_another_list(begin, free, shortened):
    addresses = free(4)
    both = [begin(addresses[:3], 0), begin(addresses[:shortened], 1)]
    for output in [one.end() for one in both]:
        assert "has another list of workers than" in output
        assert re.search("it has 3 workers, here there are [24]", output) or re.search(
            "it has [24] workers, here there are 3", output
        )
        assert "Give all workers the same cluster in TF_CONFIG" in output


def test_another_address_in_the_list(begin, free):
    a, b, c, d = free(4)
    outputs = [one.end() for one in [begin([a, b, c], 0), begin([a, b, d], 1)]]
    assert f"it has worker 2 at {d}, where this one has worker 2 at {c}" in outputs[0]
    assert f"it has worker 2 at {c}, where this one has worker 2 at {d}" in outputs[1]


def test_one_that_is_killed_while_others_wait_may_come_again(begin, free):
    addresses = free(3)
    first, second = (begin(addresses, i) for i in (0, 1))
    second.until("has waited")
    second.process.send_signal(signal.SIGKILL)
    first.until(r"worker 1 at \S+ \((it was there, but has ended|nothing listens there)")
    others = [begin(addresses, i) for i in (1, 2)]
    assert all("MET" in one.end() for one in [first, *others])


def test_one_that_stops_is_named(begin, free):
    addresses = free(2)
    stopped = begin(addresses[:1] + free(1), 0)
    stopped.until("has waited")
    stopped.process.send_signal(signal.SIGSTOP)
    output = begin(addresses, 1, 3).end()
    assert f"for worker 0 at {addresses[0]} (it accepts connections, but sends nothing)" in output


def test_whatever_strangers_send_does_no_harm(begin, free):
    addresses = free(2)
    first = begin(addresses, 0)
    first.until("has waited")
    hello = {"tfscale": 1, "place": 1, "process": "p", "start": "s", "workers": [["a", "b"]] * 2}
    wrong = [
        b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000 + b"\n", b"[]\n", b"{}\n", b"7\n",
        b"[" * 10**5 + b"\n", b'{"gave up": "all"}\n', b"x" * (5 << 20),
        *(json.dumps({**hello, **odd}).encode() + b"\n" for odd in (
            {"place": 2}, {"place": -1}, {"place": True}, {"place": "1"}, {"process": 7},
            {"start": None}, {"workers": []}, {"workers": [["a"], ["b", 3]]}, {"workers": {}},
            {"tfscale": 2}, {"tfscale": None},
        )),
    ]  # fmt: skip
    for data in wrong:
        stranger = socket.create_connection(split(addresses[0]))
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
    assert "MET" in begin(addresses, 1).end()
    assert "MET" in first.end()


def test_interrupted_it_ends_at_once(begin, free):
    waiting = begin(free(2), 0)
    waiting.until("has waited")
    waiting.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in waiting.end()
