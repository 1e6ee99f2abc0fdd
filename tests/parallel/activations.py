"""``python -m tests.parallel.activations REPLICAS [SIZE [WHAT]]``: memory of what is cut.

Trains in REPLICAS fresh processes, which cut arrays, and in one: a convolutional network of 10
layers on images of SIZE x SIZE (256 by default), whose height is cut; or, if WHAT is ``logits``,
an embedding and a dense layer on sequences of SIZE words of 16,384, whose logits are cut. Prints by
how much the resident memory of each process grew: its peak (Linux's VmHWM) beyond what the same
process held after it had trained on small images or short sequences.
"""

import json
import subprocess
import sys

BATCH, STEPS, DEPTH, WIDTH, WORDS = 4, 2, 10, 16, 16384
RULES = {
    "images": {"conv": "height"},
    "logits": {"table": "vocabulary", "logits": "columns"},
}


def model(size, what):
    import keras
    from keras import layers

    if what == "logits":
        words = keras.Input((size,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH, name="table")(words)
        made = keras.Model(words, layers.Dense(WORDS, name="logits")(x))
        made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made
    x = inputs = keras.Input((size, size, 3))
    for place in range(DEPTH):
        x = layers.Conv2D(WIDTH, 3, padding="same", activation="relu", name=f"conv{place}")(x)
    made = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    made.compile("adam", "mse")
    return made


def data(size, what):
    import numpy as np

    if what == "logits":
        words = np.ones((BATCH * STEPS, size), np.int32)
        return words, words
    x = np.ones((BATCH * STEPS, size, size, 3), np.float32)
    return x, x[:, 0, 0, :1]


def measured(replicas, size, what):
    """Return the growth of the resident memory of each process, in bytes."""
    program = ["-m", __spec__.name, "--worker", str(replicas), str(size), what]
    if replicas > 1:
        program = ["-m", "tfscale", "launch", "-n", str(replicas), *program]
    ran = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if '{"grown"' in line]
    return [json.loads(line)["grown"] for line in lines]


def worker(replicas, size, what):
    import tfscale
    from tfscale.support.resident import highest_memory
    from tfscale.tools.bench.memory import settle

    cut = {"grid": tfscale.Grid(tensor=replicas), "tensor": RULES[what]}
    strategy = tfscale.ScaleStrategy(**cut if replicas > 1 else {})

    def train(size):
        with strategy.scope():
            made = model(size, what)
        made.fit(*data(size, what), batch_size=BATCH, verbose=0)

    train(16)
    before = settle()
    train(size)
    print(json.dumps({"grown": highest_memory() - before}), flush=True)


def main(argv):
    if argv[0] == "--worker":
        worker(int(argv[1]), int(argv[2]), argv[3])
        return
    replicas, size, what = (*argv, *("256", "images")[len(argv) - 1 :])
    size = int(size)
    held = {"images": DEPTH * size * size * WIDTH, "logits": size * WORDS}[what] * BATCH * 4
    print(f"{what}: one device computes {held / 1e6:.0f} MB of activations", flush=True)
    for number in (1, int(replicas)):
        grown = [f"{each / 1e6:.0f} MB" for each in measured(number, size, what)]
        print(f"processes: {number}; resident memory grew by {', '.join(grown)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
