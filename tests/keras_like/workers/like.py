"""One worker that plays scenes and says what its user sees."""

from __future__ import annotations

from tests.keras_like import distribute, optimizer, trainer
from tests.keras_like.scenes import played
from tests.strategy.turns import take

SCENES = distribute.SCENES | optimizer.SCENES | trainer.SCENES


def seen(strategy, name):
    found = played(SCENES[name], strategy)
    return {"seen": {name: value.tolist() for name, value in found.items()}}


if __name__ == "__main__":
    take(seen, "ring")
