"""``python -m tests.parallel.activations REPLICAS [SIZE]``: memory of activations that are cut.

Trains a convolutional network of 10 layers on images of SIZE x SIZE (256 by default) in REPLICAS
fresh processes, which cut the height, and in one. Prints by how much the resident memory of each
process grew: its peak (Linux's VmHWM) beyond what the same process held after it had trained on
small images.
"""

import json
import subprocess
import sys

BATCH, STEPS, DEPTH, WIDTH = 4, 2, 10, 16


def model(size):
    import keras
    from keras import layers

    x = inputs = keras.Input((size, size, 3))
    for place in range(DEPTH):
        x = layers.Conv2D(WIDTH, 3, padding="same", activation="relu", name=f"conv{place}")(x)
    made = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    made.compile("adam", "mse")
    return made


def measured(replicas, size):
    """Return the growth of the resident memory of each process, in bytes."""
    program = ["-m", __spec__.name, "--worker", str(replicas), str(size)]
    if replicas > 1:
        program = ["-m", "tfscale", "launch", "-n", str(replicas), *program]
    ran = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if '{"grown"' in line]
    return [json.loads(line)["grown"] for line in lines]


def worker(replicas, size):
    import numpy as np

    import tfscale
    from tfscale.support.resident import highest_memory
    from tfscale.tools.bench.memory import settle

    cut = {"grid": tfscale.Grid(tensor=replicas), "tensor": {"conv": "height"}}
    strategy = tfscale.ScaleStrategy(**cut if replicas > 1 else {})

    def train(size):
        with strategy.scope():
            made = model(size)
        x = np.ones((BATCH * STEPS, size, size, 3), np.float32)
        made.fit(x, x[:, 0, 0, :1], batch_size=BATCH, verbose=0)

    train(16)
    before = settle()
    train(size)
    print(json.dumps({"grown": highest_memory() - before}), flush=True)


def main(argv):
    if argv[0] == "--worker":
        worker(*map(int, argv[1:]))
        return
    replicas, size = (*map(int, argv), 256)[:2]
    one = BATCH * size * size * WIDTH * 4
    print(f"{DEPTH} activations take {DEPTH * one / 1e6:.0f} MB", flush=True)
    for number in (1, replicas):
        grown = [f"{each / 1e6:.0f} MB" for each in measured(number, size)]
        print(f"processes: {number}; resident memory grew by {', '.join(grown)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
