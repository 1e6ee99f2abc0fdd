"""Keras's files are whole: written beside and renamed. Two workers that save to one path are in
``tests/pains`` (tf#38635).
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from tfscale.bridge import saving
from tfscale.bridge.backup import InMemory

NAMES = ["model.keras", "model.h5", "model.weights.h5"]


class Strategy:
    """Lives as long as files are to be whole."""


FUNCTIONS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)


def functions():
    return [vars(module)[name] for module, name in FUNCTIONS]


@pytest.fixture(autouse=True)
def whole():
    """Keras writes whole files, and writes as before when the test is over."""
    strategy, before = Strategy(), functions()
    saving.write_whole_files(strategy)
    assert not set(before) & set(functions())
    yield
    del strategy
    assert functions() == before


class Refusing(keras.layers.Dense):
    """Cannot be saved while ``full``."""

    full = False

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.full:
            raise OSError("full")

    def get_config(self):
        if self.full:
            raise OSError("full")
        return super().get_config()


def model():
    return keras.Sequential([keras.Input([3]), Refusing(2)])


def save(one, path):
    weights_only = str(path).endswith(".weights.h5")
    (one.save_weights if weights_only else one.save)(path)


def weights(path):
    if str(path).endswith(".weights.h5"):
        other = model()
        other.load_weights(path)
        return other.get_weights()
    objects = {"Refusing": Refusing}
    return keras.models.load_model(path, custom_objects=objects).get_weights()


@pytest.mark.parametrize("name", NAMES)
def test_a_save_that_fails_leaves_the_last_file(tmp_path, monkeypatch, name):
    one, path = model(), tmp_path / name
    save(one, path)
    monkeypatch.setattr(Refusing, "full", True)
    with pytest.raises(OSError, match="full"):
        save(one, path)
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    np.testing.assert_equal(weights(path), one.get_weights())


@pytest.mark.parametrize("name", NAMES)
def test_a_link_stays_and_its_file_is_replaced(tmp_path, name):
    (tmp_path / "disk").mkdir()
    file, link = tmp_path / "disk" / name, tmp_path / name
    link.symlink_to(file)
    one = model()
    save(one, str(link))
    assert link.is_symlink()
    np.testing.assert_equal(weights(file), one.get_weights())


@pytest.mark.parametrize("name", NAMES)
def test_a_path_in_the_current_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save(one := model(), name)
    np.testing.assert_equal(weights(name), one.get_weights())


def test_a_folder_that_is_missing_is_named_as_it_was_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing.model\.keras"):
        model().save(tmp_path / "missing" / "model.keras")


def test_what_is_no_single_file_is_keras_own(tmp_path):
    one = model()
    one.save(tmp_path / "folder", zipped=False)
    assert (tmp_path / "folder" / "config.json").exists()
    one.save_weights(content := InMemory(".weights.h5"))
    assert content.getbuffer().nbytes
    one.save_weights(tmp_path / "parts.weights.json", max_shard_size=0.1)
    assert list(tmp_path.glob("parts*.h5"))


def test_models_that_workers_share_out_are_written_and_read_weight_by_weight(tmp_path, monkeypatch):
    stores = []

    class Store(saving_lib.H5IOStore):
        def __init__(self, path, archive=None, mode="r"):
            stores.append((mode, archive is not None))
            super().__init__(path, archive, mode)

    monkeypatch.setattr(saving_lib, "H5IOStore", Store)
    model, strategy = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)]), Strategy()
    model.compile("adam", "mse")
    model.fit(np.ones([4, 3]), np.ones([4, 2]), verbose=0)
    saving.write_through_files(strategy)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert stores == [("w", False), ("r", False)]
    del strategy
    model.save(tmp_path / "other.keras")
    assert stores[2:] == [("w", True)]
    for one, other in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(one, other)
