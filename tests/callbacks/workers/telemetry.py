"""One worker that trains on the wire int8 with telemetry, in a folder that all share.

Prints SENT and the bytes of its steps as the engine counted them.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import tfscale
from tests.callbacks.telemetries import compiled, fit
from tfscale.callbacks import Telemetry, telemetry
from tfscale.tools.bench.measure import leave

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = tfscale.ScaleStrategy(algorithm="ring", wire="int8")
    with strategy.scope():
        model = compiled()
    telemetry.SHORTEST = 0  # a line for each step
    told = Telemetry(folder / "run.jsonl", folder / "board", folder / "trace.json", profile=(2, 4))
    fit(model, [told], epochs=2)
    sent = sum(
        total.sent
        for bucket, total in strategy.reducer.team.communicators[0].totals().items()
        if bucket.graph
    )
    print("\nSENT", sent, flush=True)
    me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    leave(str(folder), "worker", me, 2)
