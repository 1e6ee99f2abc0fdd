"""Network namespaces: built, shaped, and always gone in the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tfscale.tools.bench import command, link, sockets

can_shape = os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
needs_root = pytest.mark.skipif(
    not can_shape, reason="SKIPPED, NOT TESTED: --link needs root, ip and tc"
)


@pytest.mark.parametrize(
    "rate, expected",
    [("1gbit", 125e6), ("200mbit", 25e6), ("1.5Gbit", 187.5e6), ("10mbps", 10e6), ("8kibit", 1024)],
)
def test_rates_are_read_as_tc_reads_them(rate: str, expected: float) -> None:
    assert link.bytes_per_second(rate) == expected


@pytest.mark.parametrize("rate", ["", "fast", "1", "0gbit", "1gb", "-1gbit"])
def test_other_rates_are_refused(rate: str) -> None:
    with pytest.raises(link.LinkError, match="1gbit"):
        link.bytes_per_second(rate)


def test_a_burst_is_a_moment_and_no_less_than_two_packets() -> None:
    assert link.burst("10mbit") == 131072
    assert link.burst("10gbit") == 1_250_000


def test_others_than_root_are_told_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert command.main(["--link", "1gbit"]) == 1
    assert "sudo" in capsys.readouterr().err


def test_a_missing_tool_is_named(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(link.LinkError, match="tc: sudo apt-get install iproute2"):
        link.check()


@pytest.fixture
def new():
    """Namespaces of this process that the test has made: another network may be there already."""
    prefix = f"tfscale-{os.getpid()}-"
    before = set(link.namespaces())
    return lambda: [n for n in link.namespaces() if n.startswith(prefix) and n not in before]


@needs_root
def test_the_rate_is_what_was_asked_for(new) -> None:
    """Never more. Where a busy machine wakes the port late it may be less, now and then."""
    with link.Network(2, "100mbit") as network:
        assert len(new()) == 3
        with link.Network(1, "100mbit"):
            assert len(new()) == 5
        transfers = [_transfer(network) for _ in range(3)]
    assert new() == []
    for rates in zip(*transfers, strict=True):
        assert 0.6 * 12.5e6 < max(rates) < 1.1 * 12.5e6, transfers


def _transfer(network: link.Network) -> list[float]:
    addresses = [f"{host}:9000" for host in network.hosts]
    program = (
        "import sys; from tfscale.tools.bench import sockets;"
        f"print(sockets.ring_rate(int(sys.argv[1]), {addresses}, 0.4, 2))"
    )
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-c", program, str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank, prefix in enumerate(network.prefixes)
    ]
    return [float(process.communicate(timeout=60)[0]) for process in processes]


@needs_root
def test_nothing_stays_after_an_error(new) -> None:
    with pytest.raises(KeyboardInterrupt), link.Network(2, "100mbit"):
        raise KeyboardInterrupt
    assert new() == []


@needs_root
def test_nothing_stays_when_building_fails(new, monkeypatch) -> None:
    monkeypatch.setattr(link, "burst", lambda rate: "nonsense")
    with pytest.raises(link.LinkError, match="modprobe sch_tbf"), link.Network(2, "1mbit"):
        pass
    assert new() == []


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"tfscale-{dead.pid}-0-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert name in link.namespaces()
    link.remove_stale()
    assert name not in link.namespaces()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_after_a_signal(number: signal.Signals) -> None:
    argv = ["--link", "100mbit", "--processes", "2", "--sizes", "1e3"]
    run = subprocess.Popen(
        [sys.executable, "-m", "tfscale", "bench", *argv],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # What runs in a shell's background would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        names = _wait(lambda: [n for n in link.namespaces() if n.startswith(f"tfscale-{run.pid}-")])
        assert names
        time.sleep(1)  # workers are there, too
        run.send_signal(number)
        assert run.wait(100) in (128 + number, 130)
    finally:
        run.kill()
    assert not [n for n in link.namespaces() if n.startswith(f"tfscale-{run.pid}-")]


def _wait(condition, seconds: float = 100):
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return value


def test_sockets_measure_a_ring_on_the_loopback() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from tfscale.tools.bench.run import _addresses

    addresses = _addresses(["127.0.0.1"] * 3)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(sockets.ring_rate, r, addresses, 0.05, 2) for r in range(3)]
        assert all(future.result(60) > 1e6 for future in futures)
