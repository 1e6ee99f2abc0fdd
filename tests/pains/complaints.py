"""All complaints, by their numbers."""

from pathlib import Path

from tests.pains import one_process, several_workers

COMPLAINTS = one_process.COMPLAINTS | several_workers.COMPLAINTS
LAYOUTS = ("1x2", "2x1")
WORKER = Path(__file__).with_name("worker.py")
