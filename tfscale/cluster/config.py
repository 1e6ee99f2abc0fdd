"""Checks of ``TF_CONFIG``, before a worker waits for others that it does not name."""

from __future__ import annotations

import json
from typing import Any

from tfscale.cluster.addresses import is_address

_SHOWN = 500  # largest number of shown characters of a TF_CONFIG
_LIKE = (
    '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


def check(text: str) -> None:
    """Refuse a ``TF_CONFIG`` that does not define the workers and this worker's place among them.

    Without a cluster, the worker trains alone, and ``TF_CONFIG`` may hold anything.
    """
    problem = _problem(text)
    if problem:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
        raise ValueError(f"TF_CONFIG {problem}. It is {shown!r}; it should be like {_LIKE!r}.")


def _problem(text: str) -> str:
    try:
        config = json.loads(text)
    except ValueError as error:
        return f"is not JSON ({error})"
    if not isinstance(config, dict):
        return "is not a JSON object"
    if "sparseCluster" in config:
        return (
            "has a sparseCluster, which names no other worker: leave enableDynamicWorker out of "
            "the TFJob"
        )
    if not config.get("cluster"):
        return ""
    return _problem_of_cluster(config["cluster"]) or _problem_of_task(
        config.get("task"), config["cluster"]
    )


def _problem_of_cluster(cluster: Any) -> str:
    if not isinstance(cluster, dict):
        return "has a cluster that is not an object of lists of addresses"
    if "ps" in cluster:
        return "has parameter servers, which tfscale does not use: leave 'ps' out of the cluster"
    seen = set()
    for job, addresses in cluster.items():
        listed = addresses.values() if isinstance(addresses, dict) else addresses
        if not isinstance(addresses, (list, dict)):
            return f"has a cluster whose {job!r} is not a list of addresses"
        for address in listed:
            if not is_address(address):
                return f"has the address {address!r}, which is not 'host:port'"
            if address in seen:
                return f"has the address {address!r} twice: each worker needs one of its own"
            seen.add(address)
    return ""


def _problem_of_task(task: Any, cluster: dict[str, Any]) -> str:
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        return "has a cluster, but no task with a type and an index: which worker is this?"
    kind = str(task["type"])
    if kind == "evaluator":
        return ""  # an evaluator need not be in the list
    if kind not in cluster:
        return f"has the task {kind!r}, and its cluster only {', '.join(map(repr, cluster))}"
    try:
        index = int(task["index"])
    except (TypeError, ValueError):
        return f"has the index {task['index']!r}, which is not a number"
    known = cluster[kind]
    there = str(index) in known if isinstance(known, dict) else 0 <= index < len(known)
    if not there:
        return f"has the index {index}, and its list of {kind}s has {len(known)}, counted from 0"
    return ""
