"""All that tfscale knows of Keras, and of private parts of TensorFlow.

- ``hooks.py``: all functions and attributes that tfscale replaces for a while, with their reasons.
- ``installed.py``: the installed Keras, and whether it has the private names that are used.
- ``frames.py``, ``calls.py``: which functions are calling; the same, of TensorFlow.
- ``fit.py``: questions about the running ``fit``, ``evaluate``, ``predict`` or ``compile``.
- ``reading.py``: shapes of batches, read without taking a batch from the training.
- ``data.py``: data in batches, read once or many times; ``feed.py``: batches of replicas on CPUs.
- ``losses.py``: losses of elements, and what a mean divides by.
- ``output.py``: progress bars, and warnings about Keras's own defaults.
- ``objects.py``: models, layers, variables, optimizers; ``protocols.py``: their types.
- ``optimizers.py``: the base class of tfscale's optimizers.
- ``backup.py``, ``quiet.py``, ``saving.py``, ``callbacks.py``: callbacks and files of workers.
- ``tensorflow.py``: private names of ``tf.distribute``; ``functions.py``, ``tapes.py``,
  ``gradients.py``: functions, tapes and custom gradients while a step is traced.
- ``graphs.py``, ``grappler.py``: private parts of graphs; settings of their optimization.
- ``runtime.py``, ``started.py``: TensorFlow's runtime, and the line that has started it.

A file ``keras2_...`` does the same for Keras 2, which tensorflow-addons needs. No file here knows
of strategies. ``tests/bridge/test_private.py`` and ``tests/recompute/test_private.py`` test each
private name; ``tests/bridge/test_private_names.py`` finds private names in other folders.
"""
