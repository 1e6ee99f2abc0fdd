"""``python -m tests.parallel.resident DEPTH REPLICAS SHARD [LIMIT]``: planned and measured memory.

Trains an MLP of DEPTH layers of 2048 x 2048 with Adam in fresh processes, one for each replica, and
prints what a replica was planned to hold, and by how much the process's resident memory grew: its
peak (Linux's VmHWM) beyond what the same process held after it had trained a model of two weights.
With a LIMIT, such as 1GB, a process gets no more memory beyond that, and also saves the model.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

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


def measured(depth, replicas, shard, limit):
    """Return the growth of the resident memory of each process, in bytes."""
    program = ["-m", __spec__.name, "--worker", str(depth), str(shard), limit or "none"]
    if replicas > 1:
        program = ["-m", "tfscale", "launch", "-n", str(replicas), *program]
    program = [sys.executable, *program]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if '{"grown"' in line]
    return [json.loads(line)["grown"] for line in lines]


def limited(more):
    """Have Linux kill this process if it takes so many bytes more; needs root and cgroups (v1)."""
    group = pathlib.Path(f"/sys/fs/cgroup/memory/tfscale-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(more))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def worker(depth, shard, limit):
    import keras
    import numpy as np

    import tfscale
    from tfscale.support.resident import highest_memory
    from tfscale.support.sizes import number_of_bytes
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
    if limit != "none":
        limited(number_of_bytes(limit, "LIMIT"))
    with strategy.scope():
        made = model(depth)
    made.fit(x, y, batch_size=BATCH, verbose=0)
    if limit != "none":
        with tempfile.TemporaryDirectory() as folder:
            made.save(f"{folder}/model.keras")
    print(json.dumps({"grown": highest_memory() - before, "replicas": replicas}), flush=True)


def main(argv):
    if argv[0] == "--worker":
        worker(int(argv[1]), None if argv[2] == "None" else argv[2], argv[3])
        return
    depth, replicas, *more = argv
    depth, replicas, (shard, limit) = int(depth), int(replicas), [*more, None, None][:2]
    shard = None if shard == "None" else shard
    grown = measured(depth, replicas, shard, limit)
    print(f"measured: {[f'{each / 1e6:.0f} MB' for each in grown]}", flush=True)
    plan = planned(depth, replicas, shard)
    print(plan)
    print(f"planned / measured: {[f'{plan.most.total / each:.2f}' for each in grown]}")


if __name__ == "__main__":
    main(sys.argv[1:])
