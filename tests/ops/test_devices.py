"""Workers of one host share its GPUs."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfscale.native.devices import share_of, take_share


@pytest.mark.parametrize(
    ("gpus", "workers", "shares"),
    [
        ("abcd", 2, ["ab", "cd"]),
        ("abcd", 4, ["a", "b", "c", "d"]),
        ("abcd", 1, ["abcd"]),
        ("abcde", 2, ["ab", "cd"]),  # as many for each
        ("a", 2, ["a", "a"]),  # the launcher gave each its own
        ("", 2, ["", ""]),
    ],
)
def test_shares(gpus, workers, shares):
    assert ["".join(share_of(gpus, i, workers)) for i in range(workers)] == shares


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs, as TensorFlow tells of them."""
    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{i}") for i in range(4)]
    taken = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda some, kind: taken.append(some))
    return SimpleNamespace(gpus=gpus, taken=taken)


def worker(index, count, shares=True):
    return SimpleNamespace(local_index=index, local_count=count, shares_gpus=shares)


def test_a_worker_takes_its_share(machine):
    take_share(worker(1, 2))
    assert machine.taken == [machine.gpus[2:]]


@pytest.mark.parametrize("alone", [worker(0, 1), worker(1, 2, shares=False), worker(4, 5)])
def test_a_worker_that_has_its_own_leaves_them(machine, alone):
    take_share(alone)
    assert not machine.taken


def test_gpus_in_use_are_told(machine, monkeypatch):
    def refuse(some, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match="2 workers share this host and its 4 GPUs. This"):
        take_share(worker(0, 2))
