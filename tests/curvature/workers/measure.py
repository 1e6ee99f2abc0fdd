"""One worker of several, with one device each: prints what operators say."""

from __future__ import annotations

import tfscale
from tests.curvature.replicas import told

if __name__ == "__main__":
    print("\nTOLD", told(tfscale.ScaleStrategy(algorithm="ring", own_losses="mean")), flush=True)
