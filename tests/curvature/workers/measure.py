"""One worker of several, with one device each: prints what operators say."""

from __future__ import annotations

import sys

import tfscale
from tests.curvature.replicas import told

if __name__ == "__main__":
    strategy = tfscale.ScaleStrategy(algorithm="ring", own_losses="mean")
    print("\nTOLD", told(strategy, sys.argv[1:]), flush=True)
