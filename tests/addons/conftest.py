"""Tests of Keras 2 and tensorflow-addons, which has no release for later ones: make test-addons."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("tensorflow_addons") else ["test_*.py"]
