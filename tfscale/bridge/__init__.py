"""All that tfscale knows of Keras, and of TensorFlow's private parts.

- ``installed.py``: which Keras is installed, and whether it has the private names that are used.
- ``calls.py``: which function is calling.
- ``fit.py``: what the running ``fit``, ``evaluate``, ``predict`` or ``compile`` does.
- ``reading.py``: what Keras reads for no more than its shapes, read apart from what is trained on.
- ``data.py``: data in batches, read once or many times.
- ``losses.py``: what Keras's losses are of each element, and what they divide by.
- ``output.py``: progress bars, and warnings about Keras's own defaults.
- ``objects.py``: models, layers, variables, optimizers; ``protocols.py``: what is asked of them.
- ``optimizers.py``: the base of tfscale's optimizers.
- ``backup.py``: Keras's ``BackupAndRestore``, made safe.
- ``shadow.py``: attributes of one object that hide those of its class.
- ``tensorflow.py``: private names of TensorFlow.
- ``grappler.py``: what TensorFlow's optimization of graphs leaves alone.

A file ``keras2_...`` says the same of Keras 2, which tensorflow-addons needs. Nothing here knows of
strategies. Each private name has a test in ``tests/bridge/test_private.py``.
"""
