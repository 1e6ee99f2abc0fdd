"""``python -m tests.parallel.resident DEPTH REPLICAS SHARD``: planned and measured memory.

Trains an MLP of DEPTH layers of 2048 x 2048 with Adam in fresh processes, one for each replica, and
prints what a replica was planned to hold, and by how much the process's resident memory grew: its
peak (Linux's VmHWM) beyond what the same process held after it had trained a model of two weights.
"""

import json
import subprocess
import sys

BATCH, STEPS = 64, 4


def model(depth):
    import keras

    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(depth)]
    made = keras.Sequential([keras.Input([2048]), *layers, keras.layers.Dense(1)])
    made.compile("adam", "mse")
    return made


def planned(depth, replicas, shard):
    from tfscale.parallel import memory

    return memory.of_training(model(depth), BATCH, replicas, shard)


def measured(depth, replicas, shard):
    """Return the growth of the resident memory of each process, in bytes."""
    program = [sys.executable, "-m", __spec__.name, "--worker", str(depth), str(shard)]
    if replicas > 1:
        program = [
            *(sys.executable, "-m", "tfscale", "launch", "-n", str(replicas)),
            *("-m", __spec__.name, "--worker", str(depth), str(shard)),
        ]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if '{"grown"' in line]
    return [json.loads(line)["grown"] for line in lines]


def worker(depth, shard):
    import keras
    import numpy as np

    import tfscale
    from tfscale.support.resident import highest_memory
    from tfscale.tools.bench.memory import settle

    strategy = tfscale.ScaleStrategy(shard=shard)
    replicas = strategy.num_replicas_in_sync
    x = np.random.default_rng(0).standard_normal([BATCH * STEPS, 2048], np.float32)
    y = x[:, :1].copy()
    with strategy.scope():
        first = keras.Sequential([keras.Input([2048]), keras.layers.Dense(1)])
        first.compile("adam", "mse")
    first.fit(x, y, batch_size=BATCH, verbose=0)
    before = settle()
    with strategy.scope():
        made = model(depth)
    made.fit(x, y, batch_size=BATCH, verbose=0)
    print(json.dumps({"grown": highest_memory() - before, "replicas": replicas}), flush=True)


def main(argv):
    if argv[0] == "--worker":
        worker(int(argv[1]), None if argv[2] == "None" else argv[2])
        return
    depth, replicas, shard = int(argv[0]), int(argv[1]), argv[2] if len(argv) > 2 else None
    grown = measured(depth, replicas, shard)
    print(f"measured: {[f'{each / 1e6:.0f} MB' for each in grown]}", flush=True)
    if shard == "all":  # tfscale.parallel.memory does not plan it yet
        return
    plan = planned(depth, replicas, shard)
    print(plan)
    print(f"planned / measured: {[f'{plan.most.total / each:.2f}' for each in grown]}")


if __name__ == "__main__":
    main(sys.argv[1:])
