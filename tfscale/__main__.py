"""`python -m tfscale` is `tfscale`."""

import sys

# Python searches the user's folder first: a json.py beside train.py would shadow Python's.
if not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

from tfscale.tools.cli import main

sys.exit(main())
