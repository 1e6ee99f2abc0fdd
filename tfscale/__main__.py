"""`python -m tfscale` is `tfscale`."""

import sys

from tfscale.cli import main

sys.exit(main())
