"""All that tfscale knows of Keras, and of private parts of TensorFlow.

docs/files.md says what each file does. A file ``keras2_...`` does it for Keras 2, which
tensorflow-addons needs. No file here knows of strategies. ``tests/bridge/test_private.py`` and
``tests/recompute/test_private.py`` test each private name; ``tests/bridge/test_private_names.py``
finds private names in other folders.
"""
