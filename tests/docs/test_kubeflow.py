"""The manifests of docs/kubeflow.md, against what Kubeflow's operators read and set."""

import json
import re
import subprocess

import pytest
from helpers import ROOT

from tfscale.cluster.sources import find_source
from tfscale.tools.launch.request import parse

yaml = pytest.importorskip("yaml")
PAGE = (ROOT / "docs" / "kubeflow.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
JOBS = {job["kind"]: job for job in map(yaml.safe_load, BLOCKS)}


def test_the_workers_of_a_tfjob_find_each_other():
    """Use a TF_CONFIG as pkg/controller.v1/tensorflow/tensorflow.go of the operator makes it."""
    job = JOBS["TFJob"]
    ((kind, replicas),) = job["spec"]["tfReplicaSpecs"].items()
    (container,) = replicas["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow" and kind == "Worker"
    name = job["metadata"]["name"]
    hosts = [f"{name}-worker-{index}.ns.svc:2222" for index in range(replicas["replicas"])]
    task = {"type": "worker", "index": 2}
    config = {"cluster": {"worker": hosts}, "task": task, "environment": "cloud"}
    source = find_source({"TF_CONFIG": json.dumps(config)})
    assert (source.index, source.addresses) == (2, hosts)


def test_the_mounts_of_a_tfjob_have_volumes():
    pod = JOBS["TFJob"]["spec"]["tfReplicaSpecs"]["Worker"]["template"]["spec"]
    volumes = {each["name"] for each in pod["volumes"]}
    assert {each["name"] for each in pod["containers"][0]["volumeMounts"]} == volumes


def test_the_pods_of_a_trainjob_start_launchers_that_meet(tmp_path):
    trainer = JOBS["TrainJob"]["spec"]["trainer"]
    stub = tmp_path / "tfscale"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    of_torchrun = {
        "PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29400",
        "PET_MASTER_ADDR": "train-node-0-0.train", "PET_NPROC_PER_NODE": "auto",
    }  # fmt: skip
    started = subprocess.run(
        [*trainer["command"], *trainer["args"]], env={**of_torchrun, "PATH": f"{tmp_path}:/bin"},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    command, *words = started.stdout.splitlines()
    request = parse([word.replace("/app/train.py", __file__) for word in words])
    assert command == "launch" and trainer["numNodes"] == 4
    assert (request.nodes.count, request.nodes.rank) == (4, 1)
    assert request.nodes.master == ("train-node-0-0.train", 29400)
    assert [host.workers for host in request.hosts] == [1]
