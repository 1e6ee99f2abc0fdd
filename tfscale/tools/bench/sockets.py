"""Rate of bare TCP sockets between workers, from which the bound of all-reduces follows.

All ranks send to the next rank and receive from the previous rank at the same time, as in a ring
all-reduce, but without arithmetic, copies or messages. One thread sends, another receives.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

_BLOCK = 1 << 16
_GO_ON, _END = b"\1", b"\0"
_PATIENCE = 120.0


def ring_rate(rank: int, addresses: Sequence[str], seconds: float, rounds: int) -> float:
    """Return the bytes per second that this rank received in its best round."""
    host, port = addresses[rank].rsplit(":", 1)
    with socket.create_server((host, int(port))) as server:
        server.settimeout(_PATIENCE)
        following = _connect(addresses[(rank + 1) % len(addresses)])
        preceding, _ = server.accept()
    with following, preceding:
        preceding.settimeout(_PATIENCE)
        rates = []
        for _ in range(rounds):
            _wait_for_all(rank, following, preceding)
            rates.append(_one_round(following, preceding, seconds))
        return max(rates)


def _connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=5)
            connection.settimeout(_PATIENCE)
            return connection
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _wait_for_all(rank: int, following: socket.socket, preceding: socket.socket) -> None:
    """Wait until all ranks are here: a token goes around twice."""
    for _ in range(2):
        if rank == 0:
            following.sendall(_GO_ON)
            preceding.recv(1)
        else:
            preceding.recv(1)
            following.sendall(_GO_ON)


def _one_round(following: socket.socket, preceding: socket.socket, seconds: float) -> float:
    def send() -> None:
        end = time.monotonic() + seconds
        block = _GO_ON * _BLOCK
        while time.monotonic() < end:
            following.sendall(block)
        following.sendall(_END * _BLOCK)

    sender = threading.Thread(target=send, daemon=True)
    start = time.perf_counter()
    sender.start()
    received = _receive(preceding)
    rate = received / (time.perf_counter() - start)
    sender.join()
    return rate


def _receive(preceding: socket.socket) -> int:
    block = memoryview(bytearray(_BLOCK))
    received = 0
    while True:
        filled = 0
        while filled < _BLOCK:
            count = preceding.recv_into(block[filled:])
            if count == 0:
                raise ConnectionError("the worker before this one has closed its connection")
            filled += count
        received += _BLOCK
        if block[0] == _END[0]:
            return received
