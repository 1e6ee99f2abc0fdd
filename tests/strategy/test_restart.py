"""Jobs that end in the middle of a training and are started again with the same command."""

import re

import pytest

from tests.strategy.groups import finish, start

pytestmark = pytest.mark.timeout(1300)
SECONDS = 200
STEPS = 4  # in an epoch


@pytest.fixture
def run(tmp_path):
    """Runs a job on one folder; (exit codes, outputs)."""

    def job(workers, callback, devices=1, **settings):
        environment = {name: str(value) for name, value in settings.items()}
        folder = str(tmp_path / "backup")
        with start(
            "restart.py", f"{workers}x{devices}", CALLBACK=callback, FOLDER=folder, **environment
        ) as group:
            outputs, _ = finish(group, SECONDS)
            for process in group.processes:
                process.wait(SECONDS)  # they end by themselves
            return [process.poll() for process in group.processes], outputs

    return job


def beginnings(output):
    """Epoch, steps so far and digest of the state, for each epoch that began."""
    found = re.findall(r"^EPOCH (\d+) (\d+) (\w+)$", output, re.MULTILINE)
    return [(int(epoch), int(steps), digest) for epoch, steps, digest in found]


def ends(output):
    """The digest of the state at the end of each epoch."""
    found = re.findall(r"^STATE (\d+) (\w+)$", output, re.MULTILINE)
    return {int(epoch): digest for epoch, digest in found}


@pytest.mark.parametrize("rule", [pytest.param("every step", marks=pytest.mark.full), "rounds"])
def test_a_job_goes_on_from_its_backup_with_any_number_of_workers(run, tmp_path, rule):
    """All workers are given the same folder, and Keras's own callback. Where replicas agree once in
    three steps, four are done at the end of an epoch: what is saved is the mean.
    """
    codes, killed = run(2, "keras", KILL=1, RULE=rule)
    assert codes[0] == -9 and codes[1] not in (0, None)
    codes, alone = run(1, "keras", KILL=2, RULE=rule)
    assert codes == [-9]
    codes, outputs = run(2, "keras", RULE=rule)
    assert codes == [0, 0], outputs
    assert beginnings(alone[0])[0] == (1, STEPS, ends(killed[0])[0])
    for output in outputs:
        assert beginnings(output)[0] == (2, 2 * STEPS, ends(alone[0])[1])
        assert beginnings(output) == beginnings(outputs[0])
        assert ends(output) == ends(outputs[0])
        assert sorted(ends(output)) == [2, 3]
    assert not (tmp_path / "backup").exists()  # as on one device: the training is done
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == [
        f"{epoch}.keras" for epoch in (1, 2, 3, 4)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "TopK(0.1)",
        pytest.param("PowerSGD(2)", marks=pytest.mark.full),
        pytest.param("RandomK(0.1)", marks=pytest.mark.full),
    ],
)
def test_a_method_goes_on_with_what_it_had_kept(run, method):
    """Bit for bit, after one of two workers was killed within an epoch."""
    codes, whole = run(2, "keras", METHOD=method)
    assert codes == [0, 0], whole
    codes, killed = run(2, "keras", METHOD=method, KILL=2)
    assert codes[0] == -9 and codes[1] not in (0, None)
    codes, outputs = run(2, "keras", METHOD=method)
    assert codes == [0, 0], outputs
    for output in outputs:
        assert beginnings(output)[0] == (2, 2 * STEPS, ends(killed[0])[1])
        assert ends(output) == {epoch: ends(whole[0])[epoch] for epoch in (2, 3)}
        assert f"DONE ['{method} + feedback', 'fp32']" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preempted", "beginning"), [(5, (1, 6)), pytest.param(7, (2, 8), marks=pytest.mark.full)]
)
def test_a_signal_makes_all_workers_save_and_leave_at_the_same_step(run, preempted, beginning):
    """Worker 1 gets it; they look every second step. In the middle of an epoch, that epoch begins
    again and its steps are kept; after its last step, which is the 8th, the next one begins. None
    leaves before the first worker has written: many launchers end all processes when one ends.
    """
    codes, told = run(2, "tfscale", devices=2, PREEMPT=preempted, SLOW=1)
    assert codes == [3, 3], told
    (one,), (other,) = (re.findall(r"^FOUND (\w+)$", output, re.MULTILINE) for output in told)
    assert one == other
    for worker, who in enumerate(("another worker", "this worker")):
        said = f"tfscale: {who} got SIGTERM: saved at step {beginning[1]}, exiting with 3"
        assert told[worker].count(said) == 1, told
    codes, outputs = run(2, "tfscale", devices=2)
    assert codes == [0, 0], outputs
    for output in outputs:
        assert beginnings(output)[0][:2] == beginning
        assert beginnings(output) == beginnings(outputs[0])
        assert "DONE" in output
