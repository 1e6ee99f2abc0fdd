"""Folders of trained models: whole, checked, resumed, and shared by workers that send nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import warm
from tests.extreme.models import CLASSES, QUICK, build, mach, samples
from tests.helpers import PATIENCE, ROOT
from tfscale.extreme import MACH
from tfscale.launch import WorkerFailed
from tfscale.support.records import RecordError

X, Y = samples(300)
WORKER = ROOT / "tests" / "extreme" / "workers" / "train.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A MACH of two repetitions and names, and its folder."""
    path = tmp_path_factory.mktemp("mach") / "run"
    made = mach([f"name {i}" for i in range(CLASSES)], repetitions=2, folder=path)
    names = [f"name {label}" for label in Y]
    made.fit(X, names, **QUICK)
    return made, path


def copied(folder, to):
    import shutil

    return Path(shutil.copytree(folder, to / "copy"))


def rewritten(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_gives_the_same_answers(folder):
    made, path = folder
    loaded = MACH.load(path, build)
    for found, expected in zip(loaded.top(X, 3), made.top(X, 3), strict=True):
        assert np.array_equal(found, expected)
    assert sorted(p.suffix for p in path.iterdir()) == [
        ".h5",
        ".h5",
        ".json",
        ".json",
        ".json",
        ".json",
    ]


def test_save_writes_a_folder_for_load(tmp_path):
    made = mach(repetitions=1)
    made.fit(X, Y, **QUICK)
    made.save(tmp_path / "saved")
    made.save(tmp_path / "saved")  # replaces the file of weights
    assert len(list((tmp_path / "saved").glob("*.h5"))) == 1
    assert np.array_equal(MACH.load(tmp_path / "saved", build).top(X, 3)[0], made.top(X, 3)[0])


def test_a_missing_repetition_is_named_and_the_rest_answers_if_asked(folder, tmp_path):
    path = copied(folder[1], tmp_path)
    (path / "repetition_0001.json").unlink()
    with pytest.raises(ValueError, match="repetitions 1 of 2 are missing"):
        MACH.load(path, build)
    rest = MACH.load(path, build, allow_missing=True)
    assert rest.top(X[:3], 2)[1].shape == (3, 2)
    assert "repetitions that are trained: 1 of 2" in rest.explain()


DAMAGES = {
    "seed": (lambda p: rewritten(p / "repetition_0001.json", seed=5), "seed: expected 0"),
    "classes": (
        lambda p: rewritten(p / "repetition_0000.json", classes=9),
        "classes: expected 300",
    ),
    "hash": (lambda p: rewritten(p / "mach.json", hash="md5"), "hash: expected 'carter"),
    "names": (lambda p: (p / "classes.json").write_text('["a", "b"]'), "are not the names"),
    "weights": (lambda p: next(p.glob("*0001*.h5")).write_bytes(b"?"), "damaged"),
    "no weights": (lambda p: next(p.glob("*0001*.h5")).unlink(), "does not exist"),
    "no manifest": (lambda p: (p / "mach.json").unlink(), "no folder of a MACH"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_belong_together_is_refused(damage, folder, tmp_path):
    path = copied(folder[1], tmp_path)
    change, words = DAMAGES[damage]
    change(path)
    with pytest.raises((RecordError, OSError), match=words):
        MACH.load(path, build)


def test_weights_of_another_model_are_refused(folder):
    def other(buckets):
        return keras.Sequential([keras.Input([X.shape[1]]), keras.layers.Dense(buckets)])

    with pytest.raises(RecordError, match="do not fit the model that build returns"):
        MACH.load(folder[1], other)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_classes_that_come_later_stay_in_their_folder(named, tmp_path):
    """Models that saw none of the new classes are valid; a MACH of another size is not."""
    names = [f"name {i}" for i in range(CLASSES)]
    new = ["new", "newer"] if named else 2
    y = [names[label] for label in Y] if named else Y
    made = mach(names if named else CLASSES, repetitions=2, folder=tmp_path)
    made.fit(X, y, **QUICK)
    before = records(tmp_path)
    made.add_classes(new)
    made.fit(X, y, **QUICK)  # has nothing to train
    assert records(tmp_path) == before
    loaded = MACH.load(tmp_path, build)
    assert np.array_equal(loaded.table(), made.table())
    assert np.array_equal(loaded.top(X[:5], 4)[1], made.top(X[:5], 4)[1])
    later = ["name 1", "newer"] if named else np.array([1, CLASSES + 1])
    loaded.compile("adam")
    loaded.fit(X[:2], later, epochs=2, verbose=0)
    assert records(tmp_path) != before
    assert MACH.load(tmp_path, build).explain().startswith(f"{CLASSES + 2} classes")
    with pytest.raises(RecordError, match="classes: expected 300"):
        mach(names if named else CLASSES, repetitions=2, folder=tmp_path).fit(X, y, **QUICK)


def test_another_mach_does_not_train_into_a_folder(folder):
    with pytest.raises(RecordError, match="buckets: expected 32"):
        mach(buckets=32, repetitions=2, folder=folder[1]).fit(X, Y, **QUICK)


class Epochs(keras.callbacks.Callback):
    """Counts epochs, and raises at the beginning of one."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.begun, self._fails_at = [], fails_at

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._fails_at:
            raise KeyboardInterrupt
        self.begun.append(epoch)


def test_a_training_goes_on_where_it_was_interrupted(tmp_path):
    """The weights are those of a training that nobody interrupted."""
    how = {"batch_size": 100, "verbose": 0, "shuffle": False}
    whole = mach(repetitions=2)
    whole.fit(X, Y, epochs=3, **how)

    first, second = mach(repetitions=2, folder=tmp_path), mach(repetitions=2, folder=tmp_path)
    counted = [Epochs(), Epochs(fails_at=2)]
    with pytest.raises(KeyboardInterrupt):
        first.fit(X, Y, epochs=3, callbacks=lambda name: [counted[int(name[-1])]], **how)
    assert [each.begun for each in counted] == [[0, 1, 2], [0, 1]]
    again = [Epochs(), Epochs()]
    second.fit(X, Y, epochs=3, callbacks=lambda name: [again[int(name[-1])]], **how)
    assert [each.begun for each in again] == [[], [2]]
    assert np.allclose(second.top(X, 5)[0], whole.top(X, 5)[0], atol=1e-6)
    assert not list(tmp_path.glob("*.backup"))

    more = mach(repetitions=2, folder=tmp_path)
    later = [Epochs(), Epochs()]
    more.fit(X, Y, epochs=4, callbacks=lambda name: [later[int(name[-1])]], **how)
    assert [each.begun for each in later] == [[3], [3]]
    model = next(iter(more.models.values()))
    assert int(model.optimizer.iterations) == 4 * 3


def test_the_fit_after_one_that_went_on_begins_where_that_ended(tmp_path):
    how = {"batch_size": 100, "verbose": 0}
    with pytest.raises(KeyboardInterrupt):
        mach(repetitions=1, folder=tmp_path).fit(X, Y, epochs=3, callbacks=[Epochs(2)], **how)
    again, later = Epochs(), Epochs()
    second = mach(repetitions=1, folder=tmp_path)
    second.fit(X, Y, epochs=3, callbacks=[again], **how)
    second.fit(X, Y, epochs=5, callbacks=[later], **how)
    assert [again.begun, later.begun] == [[2], [3, 4]]


def test_a_mach_may_be_saved_while_it_trains(tmp_path):
    made = mach(shared_trunk=True)
    with pytest.raises(ValueError, match="no epoch has ended yet"):
        early = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: made.save(tmp_path))
        made.fit(X, Y, validation_data=(X, Y), callbacks=[early], **QUICK)
    saves = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: made.save(tmp_path))
    made.fit(X, Y, validation_data=(X, Y), callbacks=[saves], **QUICK)
    loaded = MACH.load(tmp_path, build)
    assert np.allclose(loaded.top(X, 5)[0], made.top(X, 5)[0], atol=1e-6)


@pytest.mark.slow
def test_a_mach_that_was_loaded_goes_on_with_its_optimizers(tmp_path):
    how = {"batch_size": 100, "verbose": 0, "shuffle": False}
    whole = mach(repetitions=1, folder=tmp_path)
    whole.fit(X, Y, epochs=1, **how)
    loaded = MACH.load(tmp_path, build)
    loaded.compile(keras.optimizers.Adam(0.02))
    loaded.fit(X, Y, epochs=2, **how)
    whole = mach(repetitions=1)
    whole.fit(X, Y, epochs=2, **how)
    assert np.allclose(loaded.top(X, 5)[0], whole.top(X, 5)[0], atol=1e-6)


def test_models_that_are_not_built_are_refused_by_name(folder, tmp_path):
    class Subclassed(keras.Model):
        pass

    with pytest.raises(ValueError, match="Subclassed that build returned is not built"):
        MACH.load(folder[1], lambda buckets: Subclassed())
    with pytest.raises(ValueError, match="call model.build in build"):
        mach(build=lambda buckets: Subclassed(), folder=tmp_path).fit(X, Y, **QUICK)


def workers(folder, **environment):
    """Return what two workers print."""
    path = {"PYTHONPATH": str(ROOT), **environment}
    with warm.Workers([str(WORKER), str(folder)], 2, environment=path) as group:
        return group.wait(PATIENCE)


def reports(printed):
    lines = [line for output in printed for line in output.splitlines()]
    return [json.loads(line.split("REPORT ")[1]) for line in lines if "REPORT " in line]


def records(folder):
    return {path.stem: path.read_text() for path in folder.glob("repetition_*.json")}


@pytest.mark.slow
def test_workers_share_the_repetitions_and_send_nothing(tmp_path):
    """A worker is killed, and the next start trains only what the first has not."""
    with pytest.raises(WorkerFailed):
        workers(tmp_path, DIES="1")
    done = records(tmp_path)
    assert "repetition_0001" in done and "repetition_0003" not in done

    found = reports(workers(tmp_path))
    trained = [name for report in found for name in report["trained"]]
    assert sorted([*trained, *done]) == [f"repetition_{r:04}" for r in range(4)]
    assert {name: text for name, text in records(tmp_path).items() if name in done} == done
    assert [report["sockets"] for report in found] == [0, 0]
    answers = MACH.load(tmp_path, build).top(X[:4], 3)[1].tolist()
    assert [report["top"] for report in found] == [answers, answers]


@pytest.mark.full
def test_launch_starts_such_workers(tmp_path):
    launch = [sys.executable, "-m", "tfscale", "launch", "-n", "2", str(WORKER), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        launch, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(records(tmp_path)) == [f"repetition_{r:04}" for r in range(4)]


def test_a_worker_without_repetitions_has_nothing_to_validate(monkeypatch, tmp_path):
    three = {"cluster": {"worker": ["a:1", "b:2", "c:3"]}, "task": {"type": "worker", "index": 2}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(three))
    made = mach(repetitions=2, folder=tmp_path)
    assert made.fit(X, Y, validation_data=(X, Y), **QUICK).history == {}


def test_workers_without_a_folder_are_refused(monkeypatch):
    two = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(two))
    with pytest.raises(ValueError, match="2 workers share the repetitions and send nothing"):
        mach().fit(X, Y, **QUICK)
    with pytest.raises(ValueError, match="ScaleStrategy"):
        mach(shared_trunk=True, folder="/nowhere").fit(X, Y, **QUICK)
