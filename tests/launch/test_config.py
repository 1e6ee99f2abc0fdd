"""A TF_CONFIG that says nothing, or the wrong thing, is named, with its text."""

import json

import pytest

from tfscale.cluster import config
from tfscale.native.group import resolver_of

TWO = {"worker": ["a:1", "b:2"]}


def told(text):
    with pytest.raises(ValueError) as refusal:
        config.check(text)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("{'cluster': 1}", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"cluster": ["a:1"]}', "has a cluster that is not an object of lists"),
        (
            '{"cluster": {"worker": "a:1"}}',
            "has a cluster whose 'worker' is not a list of addresses",
        ),
        (
            '{"sparseCluster": {"worker": {"1": "a:1"}}}',
            "has a sparseCluster, which names no other",
        ),
    ],
)
def test_what_is_no_configuration(text, problem):
    message = told(text)
    assert message.startswith(f"TF_CONFIG {problem}")
    assert f"It is {text!r}; it should be like " in message


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:x", "a:0", "a:70000", 7, "http://a"])
def test_what_is_no_address(address):
    text = json.dumps({"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}})
    assert f"has the address {address!r}, which is not 'host:port'" in told(text)


def test_one_address_of_two_workers():
    text = json.dumps({"cluster": {"worker": ["a:1", "a:1"]}})
    assert "has the address 'a:1' twice" in told(text)


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (None, "has a cluster, but no task with a type and an index: which worker is this?"),
        ({"type": "worker"}, "has a cluster, but no task"),
        ({"type": "chief", "index": 0}, "has the task 'chief', and its cluster only 'worker'"),
        ({"type": "worker", "index": 2}, "has the index 2, and its list of workers has 2, counted"),
        ({"type": "worker", "index": -1}, "has the index -1, and its list of workers has 2"),
        ({"type": "worker", "index": "first"}, "has the index 'first', which is not a number"),
    ],
)
def test_a_task_that_is_not_in_the_cluster(task, problem):
    assert problem in told(json.dumps({"cluster": TWO, "task": task}))


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"task": {"type": "worker", "index": 0}},
        {"cluster": TWO, "task": {"type": "worker", "index": 1}},
        {"cluster": TWO, "task": {"type": "worker", "index": "1"}},
        {"cluster": {"worker": {"1": "b:2"}}, "task": {"type": "worker", "index": 1}},
        {"cluster": {"worker": ["[::1]:2"]}, "task": {"type": "worker", "index": 0}},
        {"cluster": TWO, "task": {"type": "evaluator", "index": 0}},
    ],
)
def test_what_tensorflow_takes_is_taken(good):
    config.check(json.dumps(good))


def test_parameter_servers_are_refused():
    cluster = {"cluster": {**TWO, "ps": ["c:3"]}, "task": {"type": "worker", "index": 0}}
    assert "leave 'ps' out of the cluster" in told(json.dumps(cluster))


def test_an_evaluator_computes_alone(monkeypatch):
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": TWO, "task": task}))
    assert resolver_of(None).cluster_spec().as_dict() == {}


def test_a_long_one_is_shortened():
    assert len(told("x" * 10**5)) < 1000
