"""Workers tell each other their addresses: real processes and sockets, wrong in every way."""

import asyncio
import contextlib
import itertools
import json
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.launch.processes import PATIENCE, free_ports, processes, squatter
from tfscale.cluster import collect, connections
from tfscale.cluster.collect import collect_addresses

WORKER = str(Path(__file__).parent / "workers" / "collect.py")
SAID_BY_OTHERS = (b"", b"\0\0\x12\4\0\0\0\0\0\0\3\x7f\xff\xff\xff\n", b"[]\n", b"x" * (5 << 20))


@pytest.fixture
def begin():
    with processes() as start:

        def begin(port, index, count, timeout=PATIENCE, host="127.0.0.1", **other):
            of_worker = {
                "master": [host, port], "index": index, "count": count, "ports": [9000 + index],
                "identity": "job 7", "timeout": timeout, **other,
            }  # fmt: skip
            return start(WORKER, json.dumps(of_worker))

        yield begin


@pytest.fixture
def port():
    return free_ports(1)[0]


def found(one):
    output = one.end()
    (text,) = re.findall("^FOUND (.*)$", output, re.MULTILINE) or [output]
    return [address for (address,) in json.loads(text)]


def refused(one):
    output = one.end()
    (text,) = re.findall("^REFUSED (.*)$", output, re.MULTILINE) or [f"not refused: {output}"]
    return text


def never_came(index, port, timeout):
    return (
        f"waited {timeout} s for worker {index} (not heard of at 127.0.0.1:{port}). Check that all "
        "workers were started"
    )


def local(count):
    return [f"127.0.0.1:{9000 + index}" for index in range(count)]


def test_all_meet_in_any_order(begin, port):
    late = [begin(port, index, 5) for index in (3, 1, 4, 2)]
    late[0].until("worker 3 has waited .* for worker 0 at .*nothing listens at port")
    for one in [*late, begin(port, 0, 5)]:
        assert found(one) == local(5)
    socket.create_server(("127.0.0.1", port)).close()  # it is free again


def test_a_name_of_this_host(begin, port):
    for one in [begin(port, index, 2, host="localhost") for index in (0, 1)]:
        assert found(one) == local(2)


def test_one_alone(begin, port):
    assert found(begin(port, 0, 1)) == local(1)


@pytest.mark.parametrize("answer", SAID_BY_OTHERS, ids=["silent", "binary", "list", "endless"])
def test_another_program_has_the_masters_port_and_is_sent_nothing(begin, port, answer):
    with squatter(port, answer) as heard:
        for one in [begin(port, index, 3) for index in range(3)]:
            assert found(one) == local(3)
    assert not heard


def test_two_jobs_at_one_port(begin, port):
    jobs = [[begin(port, index, 2, identity=job) for index in (0, 1)] for job in ("job 1", "job 2")]
    for one in jobs[0] + jobs[1]:
        assert found(one) == local(2)


@pytest.mark.parametrize("twice", [0, 1])
def test_two_of_one_index_are_named_to_all(begin, port, twice):
    for one in [begin(port, index, 3) for index in (0, 1, twice)]:
        assert re.search(
            rf"two processes were started as worker {twice}: process \d+ on \S+, and process \d+ "
            r"on \S+\. Start each worker once, each with its own index",
            refused(one),
        )


def test_two_of_index_0_do_not_settle_each_with_itself(port, monkeypatch):
    """The one that is interrupted between its calls finds a port later, where only it listens."""
    call, listen = connections.call, connections.listen
    calls, listeners = itertools.count(), itertools.count()

    async def interrupted_call(*arguments):
        found = await call(*arguments)
        await asyncio.sleep(0 if next(calls) else 1)
        return found

    async def late_listener(*arguments):
        await asyncio.sleep(0 if next(listeners) else 0.5)
        return await listen(*arguments)

    async def one(after):
        await asyncio.sleep(after)
        await collect_addresses(("127.0.0.1", port), 0, 3, [9000], "job 7", 5)

    async def both():
        return await asyncio.gather(one(0), one(0.2), return_exceptions=True)

    monkeypatch.setattr(connections, "call", interrupted_call)
    monkeypatch.setattr(connections, "listen", late_listener)
    for error in asyncio.run(both()):
        assert "two processes were started as worker 0" in str(error)


def test_another_number_of_workers(begin, port):
    for one in [begin(port, 0, 3), begin(port, 1, 3), begin(port, 2, 4)]:
        assert re.search(
            r"worker 2 \(process \d+ on \S+\) was started as one of 4, worker 0 \(process \d+ on "
            r"\S+\) as one of 3\. Tell all workers the same number",
            refused(one),
        )


def test_worker_0_names_to_all_the_one_that_never_comes(begin, port):
    others = [begin(port, index, 4) for index in (1, 3)]
    for one in others:
        one.until("has waited .* for worker 0")
    for one in [begin(port, 0, 4, timeout=6), *others]:
        assert never_came(2, port, timeout=6) in refused(one)


def test_who_waits_no_longer_than_worker_0_names_the_missing_one_too(begin, port):
    others = [begin(port, index, 4) for index in (0, 1)]
    for one in others:
        one.until("has waited .* for worker 2, worker 3")
    assert "worker 3 has " + never_came(2, port, timeout=4) in refused(begin(port, 3, 4, timeout=4))


def test_who_calls_again_is_told_who_is_missing_though_nothing_has_changed(begin, port):
    first = begin(port, 0, 3)
    first.until("has waited .* for worker 1, worker 2")
    caller = json.dumps({"who": "worker", "index": 1, "count": 3, "ports": [9001], "process": "p"})
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as called:
            lines = called.makefile("rw")
            assert "collects" in json.loads(lines.readline())
            print(caller, file=lines, flush=True)
            assert json.loads(lines.readline()) == {"missing": "worker 2"}


def test_worker_0_never_comes(begin, port):
    error = refused(begin(port, 1, 2, timeout=2))
    assert f"worker 1 has waited 2 s for worker 0 at 127.0.0.1:{port} (nothing listens at" in error


def test_an_address_of_another_machine(begin, port):
    """Worker 0 does not reach itself there."""
    error = refused(begin(port, 0, 2, timeout=3, host="192.0.2.1"))
    assert re.search("worker 0 has waited 3 s for worker 0 at 192.0.2.1", error)


def test_a_host_that_nobody_knows(begin, port):
    error = refused(begin(port, 1, 2, timeout=2, host="no-such-host.invalid"))
    assert "its host name is not known here" in error


def test_all_ports_are_taken(begin, port, monkeypatch):
    with contextlib.ExitStack() as stack:
        for taken in range(port, port + 16):
            with contextlib.suppress(OSError):  # by another program, which is as good
                stack.enter_context(squatter(taken, b"no\n"))
        error = refused(begin(port, 0, 2, timeout=3))
    assert f"worker 0 [no port from {port} on can be opened: another program has it]" in error


def test_one_that_is_killed_while_others_wait_may_come_again(begin, port):
    others = [begin(port, index, 3) for index in (0, 1)]
    others[1].until("has waited .* for worker 2")
    others[1].process.send_signal(signal.SIGKILL)
    others[0].until("for worker 1, worker 2")
    for one in [others[0], begin(port, 1, 3), begin(port, 2, 3)]:
        assert found(one) == local(3)


def test_worker_0_that_is_killed_may_come_again(begin, port):
    others = [begin(port, index, 3) for index in (0, 1)]
    others[1].until("has waited .* for worker 2")
    others[0].process.send_signal(signal.SIGKILL)
    others[1].until("for worker 0 at")
    for one in [others[1], begin(port, 0, 3), begin(port, 2, 3)]:
        assert found(one) == local(3)


def test_whatever_strangers_send_does_no_harm(begin, port):
    first = begin(port, 0, 2)
    first.until("has waited .* for worker 1")
    hello = {"who": "worker", "index": 1, "count": 2, "ports": [9001], "process": "p"}
    wrong = [
        b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000 + b"\n", b"[]\n", b"{}\n", b"7\n",
        b"[" * 10**4 + b"\n", b'{"gave up": "all"}\n', b"x" * (5 << 20),
        *(json.dumps({**hello, **odd}).encode() + b"\n" for odd in (
            {"index": 2}, {"index": -1}, {"index": True}, {"index": "1"}, {"process": 7},
            {"ports": [0]}, {"ports": [65536]}, {"ports": None}, {"ports": []}, {"who": 7},
            {"count": "2"}, {"count": None}, {"process": "p" * 10**5},
        )),
    ]  # fmt: skip
    for data in wrong:
        stranger = socket.create_connection(("127.0.0.1", port))
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(data)
    assert found(begin(port, 1, 2)) == found(first) == local(2)


def test_worker_0_is_believed_only_if_it_makes_sense(begin, port):
    """Somebody who knows the job's name sends nonsense."""
    introduction = json.dumps({"tfscale": 1, "collects": "job 7"}).encode() + b"\n"
    wrong = (b'{"workers": ["a:1"]}\n', b'{"workers": ["a:1", 7]}\n', b'{"workers": {"a": 1}}\n',
             b'{"workers": ["a:1", "a"]}\n', b'{"missing": 7}\n', b'{"gave up": []}\n')  # fmt: skip
    with squatter(port, introduction + b"".join(wrong)) as heard:
        one = begin(port, 1, 2)
        one.until("has waited .*it is there, and waits for others")
        assert "FOUND" not in one.said and json.loads(heard[0])["index"] == 1


def test_another_version(begin, port):
    with squatter(port, b'{"tfscale": 99}\n'):
        begin(port, 1, 2).until("another version of tfscale runs there")


@pytest.mark.parametrize("index", [0, 1])
def test_interrupted_it_ends_at_once(begin, port, index):
    waiting = begin(port, index, 2)
    waiting.until("has waited")
    waiting.process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in waiting.end()


@pytest.mark.parametrize(
    ("connections", "addresses"),
    [
        ([("127.0.0.1", "127.0.0.1"), ("::1", "::1")], ["127.0.0.1:9000", "127.0.0.1:9001"]),
        (
            [("127.0.1.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.2")],
            ["10.0.0.1:9000", "10.0.0.2:9001"],
        ),
        ([("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.1")], ["10.0.0.1:9000", "10.0.0.1:9001"]),
        ([("::1", "::1"), ("fd00::1", "fd00::2")], ["[fd00::1]:9000", "[fd00::2]:9001"]),
    ],
)
def test_each_is_told_the_address_at_which_others_reach_it(connections, addresses):
    arrivals = [
        collect._Arrival(
            SimpleNamespace(own_host=own, other_host=other), "p", index, (9000 + index,)
        )
        for index, (own, other) in enumerate(connections)
    ]
    assert collect.addresses_of(arrivals) == [[address] for address in addresses]
