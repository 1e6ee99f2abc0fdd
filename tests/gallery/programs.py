"""All programs of the gallery, by name."""

from pathlib import Path

from tests.gallery import generative, sequences, tables, vision

PROGRAMS = generative.PROGRAMS | sequences.PROGRAMS | tables.PROGRAMS | vision.PROGRAMS
WORKER = Path(__file__).with_name("worker.py")
LAYOUTS = ("1x2", "1x4", "2x1")  # workers x devices

# One of each kind that has once differed from one device, and quick.
QUICK = (
    "variational autoencoder",
    "GAN",
    "diffusion",
    "text transformer",
    "endpoint layer",
    "transfer learning",
)
QUICK_LAYOUTS = ("1x2", "2x1")
