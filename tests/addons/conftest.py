"""These need Keras 2 and tensorflow-addons, which has no later Keras: make test-addons."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("tensorflow_addons") else ["test_*.py"]
