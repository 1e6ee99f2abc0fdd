"""Over what processes exchange messages, and what they say of it."""

import collections
import contextlib
import itertools
import os
import re
import socket
import threading

import pytest

from tests.integration.test_processes import OVER, SECONDS, start

pytestmark = pytest.mark.timeout(2000)


def run(count=2, transports="auto", environments=None, **environment):
    settings = {"TRANSPORTS": transports, "COUNT": count, "TF_CPP_MIN_LOG_LEVEL": 0, **environment}
    with start("transport.py", count, each=environments, **settings) as started:
        return started.wait(SECONDS)


def said(output, what):
    found = re.search(rf"^{what} (.*)$", output, re.MULTILINE)
    assert found, output[-3000:]
    return found[1]


WARNING = r"gradients go over TensorFlow's gRPC, which is slower than sockets, since (.*)"


@pytest.mark.parametrize("transports", ["auto", "sockets"])
def test_processes_of_one_host_share_memory(transports):
    for rank, output in enumerate(run(3, transports)):
        ways = ["'shared memory'"] * 3
        ways[rank] = "'itself'"
        assert said(output, "WAYS") == f"[{', '.join(ways)}]"
        assert not re.search(WARNING, output)


def test_ports_and_interface_are_those_of_the_environment():
    with socket.create_server(("127.0.0.1", 0)) as held:  # whoever takes the range meets this
        first = held.getsockname()[1]
        outputs = run(
            2,
            TFSCALE_SHARED_MEMORY=0,
            TFSCALE_PORTS=f"{first}-{min(first + 200, 65535)}",
            TFSCALE_INTERFACE="lo",
        )
    ports = [int(p) for output in outputs for p in re.findall(r"TCP to 127.0.0.1:(\d+)", output)]
    assert len(ports) == 2
    assert all(first < port <= first + 200 for port in ports)


def two_free_ports():
    """Two ports, one after the other, below those that systems give to whoever calls: a stranger
    who calls one of these again and again could meet itself there.
    """
    for first in range(12000 + os.getpid() % 10000, 32000):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in (first, first + 1):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first, first + 1
    raise AssertionError("no two free ports")


@contextlib.contextmanager
def strangers(ports):
    """Somebody who connects to the ports again and again, says little, and stays."""
    over = threading.Event()
    came = collections.Counter()

    def come():
        held = collections.deque(maxlen=300)
        for port, words in itertools.cycle(itertools.product(ports, (b"", b"\xe5", b"GET / "))):
            if over.is_set():
                return
            try:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                held[-1].sendall(words)
                came[port] += 1
            except OSError:  # nobody listens there yet, or any more
                over.wait(0.001)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        yield came
    finally:
        over.set()
        thread.join()


def test_strangers_at_the_ports_delay_nobody():
    """Ranks listen for some milliseconds only, and strangers may miss them."""
    for _ in range(5):
        first, last = two_free_ports()
        with strangers([first, last]) as came:
            outputs = run(
                3,
                "sockets",
                TFSCALE_SHARED_MEMORY=0,
                TFSCALE_STREAMS=2,
                TFSCALE_PORTS=f"{first}-{last + 200}",
                TFSCALE_INTERFACE="lo",
            )
        assert all("2 TCP connections to" in said(output, "WAYS") for output in outputs)
        if came:
            return
    pytest.fail("nobody was in the way")


@pytest.mark.parametrize("transports", ["auto", "sockets"])
def test_where_one_cannot_connect_all_are_told(transports):
    """The first rank listens where nobody is; the others call it."""
    nowhere = [{"TFSCALE_INTERFACE": "192.0.2.1"}, {}, {}]
    for output in run(3, transports, nowhere):
        if transports == "auto":
            assert "'gRPC'" in said(output, "WAYS")
            why = said(output, "WHY NOT")
            (warned,) = re.findall(WARNING, output)
            assert warned.startswith(why)
        else:
            why = said(output, "ERROR UnavailableError")
            assert "could not join its group" in why
            assert "transport='auto'" in why
        assert re.search(r"rank 0 \(worker 0 at \S+\) could not connect: 192.0.2.1: .*assign", why)
        assert re.search(r"rank 2 \(worker 2 at \S+\) could not connect: rank 0", why)


def test_workers_that_ask_for_different_transports_are_told():
    for output in run(2, "auto,grpc"):
        why = said(output, "ERROR InvalidArgumentError")
        assert "'auto'" in why
        assert "'grpc'" in why
        assert "ask for the same transport on all ranks" in why


def test_what_the_program_asks_for_comes_first():
    for output in run(2, "sockets", TFSCALE_TRANSPORT="grpc"):
        assert "'shared memory'" in said(output, "WAYS")
    for output in run(2, "auto", TFSCALE_TRANSPORT="grpc"):
        assert "'gRPC'" in said(output, "WAYS")
        assert not re.search(WARNING, output)


@pytest.mark.parametrize(
    ("count", "over", "calls"),
    [
        (3, "TCP", 500),
        (3, "shared memory", 500),
        pytest.param(3, "TCP", 10_000, marks=pytest.mark.full),
        pytest.param(4, "shared memory", 10_000, marks=pytest.mark.full),
    ],
)
def test_many_all_reduces_of_random_sizes_with_pauses(count, over, calls):
    with start("many.py", count, COUNT=count, CALLS=calls, **OVER[over]) as started:
        for output in started.wait(1800):
            assert f"ALL {calls}" in output
