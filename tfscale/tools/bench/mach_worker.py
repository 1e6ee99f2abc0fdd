"""One worker of the part ``workers`` of ``tfscale bench mach``.

Usage: ``python -m tfscale.tools.bench.mach_worker FOLDER OPTIONS``, where FOLDER is shared by all
workers and OPTIONS is a JSON object with the fields of ``Load``. Writes ``FOLDER/worker-RANK.json``
with the time before and after ``fit``, and its processor time. The clock starts when all workers
have imported TensorFlow and made their data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from tfscale.cluster.sources import find_source


@dataclasses.dataclass(frozen=True)
class Load:
    """Training that all workers share.

    Attributes:
        words: file of a list of words, or None for the largest that this machine has.
        one_in: number N, to take one word in N.
        buckets: number of buckets.
        repetitions: number of repetitions of all workers together.
        width: inputs of the last layer.
        batch: samples of a step.
        steps: number of steps of a repetition.
    """

    words: str | None
    one_in: int
    buckets: int
    repetitions: int
    width: int
    batch: int
    steps: int


def main() -> None:
    """Train this worker's repetitions and write when they began and ended."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfscale
    from tfscale.tools.bench import spelling
    from tfscale.training.extreme import MACH

    folder, load = Path(sys.argv[1]), Load(**json.loads(sys.argv[2]))
    words = spelling.load(None if load.words is None else Path(load.words), load.one_in)
    trunk = words.trunk(load.width)

    def build(buckets: int) -> keras.Model:
        inputs, hidden = trunk()
        return keras.Model(inputs, keras.layers.Dense(buckets)(hidden))

    pairs = words.draw(np.random.default_rng(0), load.batch * load.steps)
    data = tf.data.Dataset.from_tensor_slices(pairs).batch(load.batch, drop_remainder=True)
    made = MACH(build, words.classes, load.buckets, load.repetitions, folder=folder / "run")
    made.compile("adam")
    _meet(folder)
    begin, begin_processor = time.time(), time.process_time()
    history = made.fit(data, verbose=0)
    report = {
        "begin": begin, "end": time.time(), "processor": time.process_time() - begin_processor,
        "repetitions": len(history.models),
    }  # fmt: skip
    (folder / f"worker-{tfscale.rank()}.json").write_text(json.dumps(report))


def _meet(folder: Path) -> None:
    """Wait until all workers are here, so that none trains alone while others still import."""
    source = find_source(os.environ)
    (folder / f"ready-{0 if source is None else source.index}").touch()
    count = 1 if source is None else source.count
    while len(list(folder.glob("ready-*"))) < count:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
