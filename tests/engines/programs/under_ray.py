"""The program of docs/ray.md under a real Ray, one of whose workers is killed in its third epoch.

``under_ray.py FOLDER``, where the page's program is ``train.py``. Prints EPOCHS with all that the
first worker has trained, and ERROR with the largest difference from what one device trains.
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import ray
from ray import cloudpickle

FOLDER = Path(sys.argv[1])
EPOCHS = 5
sys.path.insert(0, str(FOLDER))
import train as page  # noqa: E402


class Killed(page.Report):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if ray.train.get_context().get_world_rank() == 0:
            with open(FOLDER / "EPOCHS", "a") as file:
                file.write(f"{epoch}\n")
        elif epoch == 2 and not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Kept(keras.callbacks.Callback):
    """Stand-in for Ray's report, where there is no Ray."""

    weights = ()

    def on_epoch_end(self, epoch, logs=None):
        Kept.weights = self.model.get_weights()


def alone():
    """The weights that one device trains."""
    page.Report = Kept
    page.train({"backup": str(FOLDER / "alone"), "epochs": EPOCHS})
    return Kept.weights


def main():
    page.Report = Killed
    cloudpickle.register_pickle_by_value(page)
    ray.init(num_cpus=3, include_dashboard=False)
    result = page.trainer(str(FOLDER), epochs=EPOCHS).fit()
    with result.checkpoint.as_directory() as folder:
        found = keras.models.load_model(f"{folder}/model.keras").get_weights()
    ray.shutdown()
    print("METRICS", json.dumps(result.metrics))
    print("EPOCHS", json.dumps([int(line) for line in (FOLDER / "EPOCHS").read_text().split()]))
    print("ERROR", max(np.abs(a - b).max() for a, b in zip(found, alone())))


if __name__ == "__main__":
    main()
