"""Runs the tutorial's program on two workers, and reads what they print."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.strategy.groups import start

TITLE = "Multi-worker training with Keras"
LINK = "https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras"
PROGRAM = Path(__file__).with_name("tutorial_program.py")
SECONDS = 600


def follow(strategy: str) -> list[dict[str, Any]]:
    """Return the report of each worker at the end; raise ``WorkerFailed`` if a worker fails."""
    with start(PROGRAM, "2x1", STRATEGY=strategy) as group:
        outputs = group.wait(SECONDS)
    return [
        json.loads(re.search(r"^TUTORIAL (.*)$", output, re.MULTILINE)[1]) for output in outputs
    ]
