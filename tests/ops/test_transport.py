"""Answers of a group about its transport, and its refusals."""

import pytest
import tensorflow as tf

from tfscale import ScaleStrategy
from tfscale.native import transport
from tfscale.native.transport import attributes
from tfscale.ops import Group, all_reduce


def test_by_default_nothing_is_asked_of_the_network():
    assert attributes("auto", "10.0.0.3", {}) == {
        "transport": "auto",
        "host": "10.0.0.3",
        "first_port": 0,
        "last_port": 0,
        "streams": 1,
        "shared_memory": True,
    }


def test_the_environment_says_where_to_listen():
    found = attributes(
        "sockets",
        "10.0.0.3",
        {
            "TFSCALE_INTERFACE": "eth1",
            "TFSCALE_PORTS": "20000-20100",
            "TFSCALE_SHARED_MEMORY": "0",
            "TFSCALE_STREAMS": "4",
            "TFSCALE_TRANSPORT": "grpc",
        },
    )
    assert found == {
        "transport": "sockets",
        "host": "eth1",
        "first_port": 20000,
        "last_port": 20100,
        "streams": 4,
        "shared_memory": False,
    }
    assert attributes("auto", "", {"TFSCALE_INTERFACE": "eth1"})["host"] == "", "it is alone"
    assert attributes("auto", "", {"TFSCALE_PORTS": " 7000 "})["last_port"] == 7000
    assert attributes("auto", "", {"TFSCALE_TRANSPORT": "grpc"})["transport"] == "grpc"


@pytest.mark.parametrize(
    ("asked", "environment", "message"),
    [
        ("tcp", {}, "transport is 'auto', 'sockets' or 'grpc'; got 'tcp'"),
        ("auto", {"TFSCALE_TRANSPORT": "x"}, "TFSCALE_TRANSPORT is 'auto', .*; got 'x'"),
        ("auto", {"TFSCALE_PORTS": "http"}, "TFSCALE_PORTS is a range .* got 'http'"),
        ("auto", {"TFSCALE_PORTS": "9-8"}, "range of ports such as 20000-20100"),
        ("auto", {"TFSCALE_PORTS": "1-99999"}, "from 1 to 65535"),
        ("auto", {"TFSCALE_PORTS": "0"}, "from 1 to 65535"),
        ("auto", {"TFSCALE_STREAMS": "0"}, "TFSCALE_STREAMS is a whole number from 1 to 64"),
        ("auto", {"TFSCALE_STREAMS": "many"}, "got 'many'"),
        ("auto", {"TFSCALE_SHARED_MEMORY": "no"}, "TFSCALE_SHARED_MEMORY is 1 or 0, got 'no'"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, environment, message):
    with pytest.raises(ValueError, match=message):
        attributes(asked, "", environment)


ADDRESSES = {
    "node1": "127.0.1.1",  # as Debian's /etc/hosts has it on node1
    "node2": "10.0.0.2",
    "service": "10.96.0.7",  # a virtual address that no machine has
    "localhost": "127.0.0.1",
}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.1"),
        ("localhost", ["localhost"], "localhost"),
        ("node1", ["node1"], "node1"),
        ("node1", ["node1", "node2"], "10.0.0.1"),
        ("service", ["service", "10.96.0.8"], "10.0.0.1"),
    ],
)
def test_a_worker_listens_where_others_reach_it(monkeypatch, own, others, expected):
    """Pretend to be a machine that has 10.0.0.1 and the loopback."""

    def address(host):
        return ADDRESSES.get(host, host)

    monkeypatch.setattr(transport, "resolved", lambda h: [(2, 1, 6, "", (address(h), 0))])
    monkeypatch.setattr(
        transport, "is_here", lambda h: address(h).startswith("127.") or address(h) == "10.0.0.1"
    )
    monkeypatch.setattr(transport, "_address_towards", lambda h: "10.0.0.1")
    assert transport.reachable_host(own, others) == expected


def test_names_and_routes_of_this_machine():
    assert transport.reachable_host("127.0.0.1", ["127.0.0.1"]) == "127.0.0.1"
    assert transport.reachable_host("localhost", ["no such host"]) in ("localhost", "127.0.0.1")
    assert transport.is_here("127.0.0.1")
    assert not transport.is_here("192.0.2.1")
    assert transport.is_loopback("localhost")
    assert transport._address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("over", ["auto", "sockets", "grpc"])
def test_ranks_of_one_process_need_no_network(over):
    group = Group.local(["CPU:0", "CPU:1"], transport=over)
    one, other = group.communicators
    assert one.ways() == [], "they have not come together"
    total = group.function(lambda c, x: all_reduce(x, c))
    for n in (3, 100_000):
        for y in total([tf.ones([n]), tf.ones([n])]):
            assert set(y.numpy()) == {2}
    assert one.ways() == ["itself", "the same process"]
    assert other.ways() == ["the same process", "itself"]
    assert one.why_not_sockets() == ""


def test_a_strategy_refuses_before_it_starts_anything():
    with pytest.raises(ValueError, match="transport is 'auto'"):
        ScaleStrategy(transport="ucx")


def test_a_strategy_says_how_gradients_go():
    strategy = ScaleStrategy(devices=["CPU:0", "CPU:1"], transport="sockets")
    assert strategy.explain().ways == "within this process to 1"
    assert ScaleStrategy(devices=["CPU:0"]).explain().ways == ""
