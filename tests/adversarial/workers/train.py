"""One worker that trains on adversarial samples, and prints its weights."""

from __future__ import annotations

import json

import keras

import tfscale
from tests.adversarial.models import dense, fit
from tfscale.adversarial import PGD
from tfscale.callbacks import Adversarial

ATTACKS = (PGD(0.1, steps=2),)


def train(model, attack):
    fit(model, Adversarial(attack, share=0.5))
    return [w.tolist() for w in model.get_weights()]


def model():
    return dense(keras.layers.BatchNormalization())


if __name__ == "__main__":
    strategy = tfscale.ScaleStrategy(algorithm="ring")
    found = []
    for attack in ATTACKS:
        with strategy.scope():
            one = model()
        found.append(train(one, attack))
    print("TRAINED", json.dumps(found))
