"""Warnings of layers that cannot be exact come once, with a remedy; exact layers cause none."""

import logging

import keras
import numpy as np
import pytest

from tfscale import ScaleStrategy
from tfscale.strategy import inexact

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(inexact, "_warned", set())


def told(caplog, strategy, layers, loss="mse"):
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", loss)
    x = np.ones((8, 5), np.float32)
    with caplog.at_level(logging.WARNING, "tfscale"):
        for _ in range(2):
            model.fit(x, np.zeros((8, 1), np.float32), batch_size=8, verbose=0)
            model.make_train_function(force=True)  # it is traced again
    return [record.getMessage() for record in caplog.records if "one device" in record.getMessage()]


def test_an_exact_model_says_nothing(caplog):
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    assert told(caplog, ScaleStrategy("ring", devices=DEVICES), layers) == []


def test_local_batch_norm(caplog):
    strategy = ScaleStrategy("ring", devices=DEVICES, batch_norm="local")
    layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1)]
    (sentence,) = told(caplog, strategy, layers)
    assert "norm normalize by one replica's samples, 2 times fewer" in sentence
    assert "batch_norm='synchronized' is exact" in sentence


def test_a_loss_that_gives_one_number(caplog):
    def own(y_true, y_pred):
        return keras.ops.max(keras.ops.square(y_true - y_pred))

    strategy = ScaleStrategy("ring", devices=DEVICES)
    (sentence,) = told(caplog, strategy, [keras.layers.Dense(1)], own)
    assert "the loss 'own' gives one number" in sentence
    assert "let it return one number for each sample." in sentence
