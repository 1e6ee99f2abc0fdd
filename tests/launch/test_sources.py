"""Launchers' variables: their meaning, contradictions between them, and broken ones."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from tests.launch.processes import PATIENCE, ROOT
from tfscale.cluster import slurm
from tfscale.cluster.ancestors import ancestor
from tfscale.cluster.sources import ORDER, find_source, find_sources

TASKS = {"worker": [f"h{i}:2222" for i in range(4)]}


def tf_config(index=1, cluster=TASKS, kind="worker"):
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def torchrun(index=1, count=4, **other):
    return {
        "RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_RANK": str(index % 2),
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "r7", "TORCHELASTIC_RESTART_COUNT": "0", **other,
    }  # fmt: skip


def open_mpi(index=1, count=4, on_host=4, **other):
    return {
        "OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index % on_host),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(on_host), "PMIX_NAMESPACE": "prterun-h0-77@1", **other,
    }  # fmt: skip


def mpich(index=1, count=4, on_host=4, **other):
    return {
        "PMI_RANK": str(index), "PMI_SIZE": str(count), "MPI_LOCALRANKID": str(index % on_host),
        "MPI_LOCALNRANKS": str(on_host), **other,
    }  # fmt: skip


def srun(index=1, count=4, node=0, local=1, **other):
    """Two tasks on each of two hosts."""
    return {
        "SLURM_JOB_ID": "100", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(index),
        "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local), **other,
    }  # fmt: skip


MASTER = {"MASTER_ADDR": "h0", "MASTER_PORT": "29400"}
STALE = {"TORCHELASTIC_RUN_ID": ""}  # set by hand, once


def without(variables, name):
    return {each: value for each, value in variables.items() if each != name}


def told(environ):
    with pytest.raises(ValueError) as refusal:
        find_source(environ)
    return str(refusal.value)


def place(source):
    return source.name, source.index, source.count, source.local_index, source.local_count


# ---------------------------------------------------------------------- each source


def test_nothing_says_nothing():
    assert find_source({}) is None and find_sources({}) == []


def test_tf_config():
    source = find_source(tf_config(2))
    assert place(source) == ("TF_CONFIG", 2, 4, 0, 1)
    assert source.addresses == TASKS["worker"]


@pytest.mark.parametrize(
    ("kind", "index", "place"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_the_chief_is_the_first_worker(kind, index, place):
    cluster = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    source = find_source(tf_config(index, cluster, kind))
    assert (source.index, source.count, source.addresses) == (place, 3, ["a:1", "b:1", "c:1"])


def test_workers_that_tf_config_counts_itself():
    source = find_source(tf_config(5, {"worker": {"10": "c:1", "5": "b:1"}}))
    assert (source.index, source.count, source.addresses) == (0, 2, ["b:1", "c:1"])


def test_an_evaluator_does_not_train():
    assert find_source({**srun(), **tf_config(0, TASKS, "evaluator")}) is None


@pytest.mark.parametrize("text", ["{}", '{"task": {"type": "worker", "index": 0}}'])
def test_a_tf_config_without_a_cluster_says_nothing(text):
    assert find_source({"TF_CONFIG": text}) is None
    assert find_source({"TF_CONFIG": text, **srun()}).name == "Slurm"


def test_torchrun():
    source = find_source(torchrun(3))
    assert place(source) == ("torchrun", 3, 4, 1, 2)
    assert (source.addresses, source.master) == (None, ("h0", 29500))
    after_a_failure = find_source(torchrun(2, TORCHELASTIC_RESTART_COUNT="1"))
    assert source.identity == after_a_failure.identity
    assert source.identity != find_source(torchrun(3, TORCHELASTIC_RUN_ID="r8")).identity


def test_torchruns_variables_set_by_another_have_one_process_on_each_host():
    rest = without(without(torchrun(3, **STALE), "LOCAL_RANK"), "LOCAL_WORLD_SIZE")
    assert place(find_source(rest)) == ("torchrun", 3, 4, 0, 1)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_some_of_torchruns_variables_are_of_others(name):
    assert find_source(without(torchrun(), name)) is None


def test_open_mpi_on_one_host():
    source = find_source(open_mpi(3))
    assert place(source) == ("Open MPI", 3, 4, 3, 4)
    host, port = source.master
    assert host == "127.0.0.1" and 12000 <= port < 32000
    assert find_source(open_mpi(0)).master == source.master
    other = find_source(open_mpi(PMIX_NAMESPACE="prterun-h0-78@1"))
    assert other.master != source.master and other.identity != source.identity


def test_open_mpi_4_names_its_job_otherwise():
    job = {"PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "77"}
    assert find_source(open_mpi(**job)).identity == "Open MPI 77"


@pytest.mark.parametrize("launched", [open_mpi, mpich])
def test_mpi_on_several_hosts_needs_a_master(launched):
    source = find_source(launched(3, on_host=2, **MASTER))
    assert place(source)[1:] == (3, 4, 1, 2) and source.master == ("h0", 29400)
    message = told(launched(3, on_host=2))
    assert "as worker 3 of 4, but does not say where the others are" in message
    assert "mpirun -" in message and "MASTER_ADDR" in message and "29400 ..." in message


def test_mpich_on_one_host_needs_one_where_no_parent_names_the_job():
    assert "mpirun -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29400" in told(mpich())


def test_slurm():
    sources = [find_source(srun(i, node=i // 2, local=i % 2)) for i in range(4)]
    assert [place(source) for source in sources] == [("Slurm", i, 4, i % 2, 2) for i in range(4)]
    ports = slurm.unreserved_port(100, 0, 0), slurm.unreserved_port(100, 0, 1)
    assert 12000 <= ports[0] < ports[1] < 32768
    for source in sources:
        assert source.addresses == [f"n{host}:{port}" for host in (1, 2) for port in ports]


def test_slurm_cyclic():
    variables = srun(1, node=1, local=0, SLURM_DISTRIBUTION="cyclic:block,Pack")
    hosts = [address.split(":")[0] for address in find_source(variables).addresses]
    assert hosts == ["n1", "n2", "n1", "n2"]


def test_slurm_reserves_ports():
    source = find_source(srun(SLURM_STEP_RESV_PORTS="12000-12001,12010"))
    assert source.addresses == ["n1:12000", "n1:12001", "n2:12000", "n2:12001"]


@pytest.mark.parametrize(
    "own", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_GPU_BIND": "single:1"},
            {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}]
)  # fmt: skip
def test_slurm_may_give_each_task_its_own_gpus(own):
    assert (
        find_source(srun(SLURM_GPU_BIND="none")).shares_gpus
        and not find_source(srun(**own)).shares_gpus
    )


@pytest.mark.parametrize(
    "alone",
    [
        torchrun(0, 1, LOCAL_WORLD_SIZE="1"), open_mpi(0, 1, 1), mpich(0, 1, 1), srun(0, 1),
        {"SLURM_JOB_ID": "100", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
    ],
)  # fmt: skip
def test_one_process_trains_alone(alone):
    assert find_source(alone) is None
    assert find_source({**alone, **tf_config()}).name == "TF_CONFIG"


# ---------------------------------------------------------------------- several


def test_the_order_is_that_of_precedence():
    everything = {**tf_config(), **torchrun(), **open_mpi(), **mpich(), **srun()}
    assert tuple(source.name for source in find_sources(everything)) == ORDER
    assert find_source(everything).name == "TF_CONFIG"


@pytest.mark.parametrize("inner", [torchrun(5, 8), open_mpi(5, 8, 8), mpich(5, 8, 4, **MASTER)])
def test_a_launcher_within_slurms_step_counts(inner):
    assert find_source({**srun(), **inner}).count == 8
    assert find_source(
        {**srun(), **inner, **tf_config(5, {"worker": [f"h:{i}" for i in range(1, 9)]})}
    )


def test_one_process_of_a_launcher_within_a_step_trains_alone():
    assert find_source({**srun(), **open_mpi(0, 1, 1)}) is None


def test_srun_sets_pmis_variables_too():
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    assert find_source({**srun(), **pmi}).name == "Slurm"


@pytest.mark.parametrize(
    "other", [torchrun(2), torchrun(1, 8), open_mpi(2), mpich(2, **MASTER), srun(0, local=0)]
)
def test_an_old_tf_config_is_a_contradiction(other):
    message = told({**other, **tf_config()})
    assert "TF_CONFIG says that this is worker 1 of 4: TF_CONFIG={" in message
    (source,) = find_sources(other)
    assert f"{source.name} says that this is worker {source.index} of {source.count}: " in message
    for name, value in source.evidence.items():
        assert f"{name}={value}" in message
    assert "`unset TF_CONFIG`" in message and "set TFSCALE_LAUNCH=1" in message


@pytest.mark.parametrize("under", [srun(), open_mpi(), mpich(**MASTER)])
def test_old_variables_of_torchrun_are_a_contradiction(under):
    message = told({**torchrun(0, 4, **STALE), **under})
    assert "torchrun says that this is worker 0 of 4: WORLD_SIZE=4, RANK=0, " in message
    assert "`unset WORLD_SIZE RANK " in message


def test_what_agrees_is_no_contradiction():
    assert find_source({**torchrun(1, **STALE), **srun()}).name == "torchrun"
    assert find_source({**tf_config(), **srun()}).name == "TF_CONFIG"


def test_our_own_launcher_alone_counts():
    mine = {"TFSCALE_LAUNCH": "1"}
    assert find_source({**tf_config(), **srun(0, local=0), **mine}).name == "TF_CONFIG"
    assert find_source({**srun(), **mine}) is None


# ---------------------------------------------------------------------- what is broken


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (tf_config(7), "TF_CONFIG has the index 7"),
        (torchrun(RANK="x"), "RANK is a number, 0 or more; got 'x'"),
        (torchrun(4), "RANK=4 is not below 4"),
        (torchrun(WORLD_SIZE="many"), "WORLD_SIZE is a number, 1 or more; got 'many'"),
        (torchrun(LOCAL_RANK="2"), "LOCAL_RANK=2 is not below 2"),
        (without(torchrun(), "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set, though other"),
        (without(torchrun(), "LOCAL_RANK"), "LOCAL_RANK is not set, though other"),
        (without(torchrun(), "MASTER_PORT"), "MASTER_PORT is not set, though other"),
        (torchrun(MASTER_PORT="0"), "MASTER_PORT is a number, 1 or more; got '0'"),
        (torchrun(MASTER_PORT="65536"), "MASTER_PORT=65536 is not below 65536"),
        (open_mpi(OMPI_COMM_WORLD_RANK="-1"), "WORLD_RANK is a number, 0 or more; got '-1'"),
        (without(open_mpi(), "OMPI_COMM_WORLD_RANK"), "OMPI_COMM_WORLD_RANK is not set"),
        (open_mpi(MASTER_ADDR="h0"), "MASTER_PORT is not set, though other variables of Open MPI"),
        (open_mpi(MASTER_PORT="1"), "MASTER_ADDR is not set, though other variables of Open MPI"),
        (mpich(PMI_RANK="²"), "PMI_RANK is a number, 0 or more; got '²'"),
        (without(mpich(), "MPI_LOCALNRANKS"), "MPI_LOCALNRANKS is not set, though other"),
        (srun(SLURM_PROCID="x"), "SLURM_PROCID is a number"),
        (srun(4), "SLURM_PROCID=4 is not below 4"),
        (without(srun(), "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS is not set"),
        (srun(SLURM_STEP_NODELIST="n[1-"), "SLURM_STEP_NODELIST='n[1-' is not a list of hosts"),
        (srun(SLURM_STEP_NODELIST="n[2-1]"), "has a range that runs backwards, [2-1]"),
        (without(srun(), "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set, though other"),
        (srun(SLURM_STEP_TASKS_PER_NODE="2(x"), "SLURM_STEP_TASKS_PER_NODE='2(x' is not a list of"),
        (srun(SLURM_STEP_TASKS_PER_NODE="3,2"), "2 hosts, 2 numbers of tasks with the sum 5"),
        (srun(SLURM_STEP_TASKS_PER_NODE="4"), "2 hosts, 1 numbers of tasks with the sum 4, and 4"),
        (srun(SLURM_STEP_RESV_PORTS="x"), "SLURM_STEP_RESV_PORTS='x' is not a list of ports"),
        (srun(SLURM_STEP_RESV_PORTS="12000"), "has 1 ports, and a host has 2 workers: use srun"),
        (srun(SLURM_DISTRIBUTION="plane"), "SLURM_DISTRIBUTION='plane' is not block or cyclic"),
        (srun(SLURM_DISTRIBUTION="arbitrary"), "='arbitrary' is not block or cyclic: use srun"),
        (srun(node=1, local=0), "this is process 1 of host 0, but SLURM_NODEID and SLURM_LOCALID "
                                "say process 0 of host 1"),
        (without(srun(), "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
    ],
)  # fmt: skip
def test_a_broken_variable_is_named(variables, words):
    assert words in told(variables)


# ---------------------------------------------------------------------- lists of hosts


def naive(text):
    """Letter by letter, the other way round: the first bracket that can be taken is."""
    depth, words = 0, [""]
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [host for word in words for host in naive_word(word)]


def naive_word(word):
    if "[" not in word:
        return [word]
    before, _, rest = word.partition("[")
    inside, _, after = rest.partition("]")
    hosts = []
    for one in inside.split(","):
        first, last = one.split("-") if "-" in one else (one, one)
        for i in range(int(first), int(last) + 1):
            hosts += [before + f"{i:0{len(first)}d}" + end for end in naive_word(after)]
    return hosts


def ranges():
    number = st.tuples(st.integers(0, 120), st.integers(0, 4), st.integers(1, 4)).map(
        lambda n: f"{n[0]:0{n[2]}d}" + (f"-{n[0] + n[1]:0{n[2]}d}" if n[1] else "")
    )
    return st.lists(number, min_size=1, max_size=3).map(lambda all: f"[{','.join(all)}]")


WORDS = st.text("abz-.09", min_size=1, max_size=4)
NAMES = st.lists(st.one_of(WORDS, ranges()), min_size=1, max_size=4).map("".join)


@given(st.lists(NAMES, min_size=1, max_size=4).map(",".join))
def test_lists_of_hosts_are_written_out(text):
    assert slurm.hosts(text) == naive(text)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", "a"),
        ("a[1-3,07-10]b,c", "a1b a2b a3b a07b a08b a09b a10b c"),
        ("r[0-1]n[8-10]", "r0n8 r0n9 r0n10 r1n8 r1n9 r1n10"),
        ("n[098-101]", "n098 n099 n100 n101"),
    ],
)
def test_lists_of_hosts_as_slurm_writes_them(text, hosts):
    assert slurm.hosts(text) == naive(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a b", "a[]", "a[1", "a]1[", "a[1-]", "a[x]", "a[[1]]"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ValueError, match="is not a list of hosts"):
        slurm.hosts(text)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_every_task_has_one_place_however_tasks_are_dealt(each):
    block, cyclic = (slurm.places(each, kind) for kind in ("block", "cyclic"))
    assert sorted(block) == sorted(cyclic) == block
    rounds = [[host for host, count in enumerate(each) if count > turn] for turn in range(3)]
    assert cyclic == [(host, turn) for turn, hosts in enumerate(rounds) for host in hosts]


def test_numbers_of_tasks():
    assert slurm.tasks("2(x3),1") == [2, 2, 2, 1]


# ---------------------------------------------------------------------- ancestors


def test_the_nearest_ancestor_of_a_name(tmp_path):
    """A shell in between does not matter."""
    copy = shutil.copy("/bin/bash", tmp_path / "hydra_pmi_proxy")
    program = tmp_path / "program.py"
    program.write_text(
        "from tfscale.cluster.ancestors import ancestor; print(ancestor('hydra_pmi_proxy'))"
    )
    done = subprocess.run(
        [copy, "-c", f"echo $$; sh -c '{sys.executable} {program}; true'; true"],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    proxy, told = done.stdout.split() or [done.stderr]
    assert proxy == told
    assert ancestor("hydra_pmi_proxy") == ""


def test_kubernetes_workers_as_the_page_makes_them():
    """The command in docs/clusters.md, run with the variable that Kubernetes sets."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    script = re.search(r" +hosts=(?:.*\n)+?(?= +exec python /app/train.py)", page)[0]
    done = subprocess.run(
        ["sh", "-c", script + "echo $TF_CONFIG"],
        env={"JOB_COMPLETION_INDEX": "2", "WORKERS": "4", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    source = find_source({"TF_CONFIG": done.stdout})
    assert (source.index, source.count) == (2, 4), done.stderr
    assert source.addresses == [f"train-{i}.train:2222" for i in range(4)]
