"""Exchange of a step's gradients and statistics between all replicas.

- ``buckets.py`` decides which gradients are sent together.
- ``lookups.py`` and ``dataflow.py`` find the tables whose rows all replicas look up alike.
- ``reducer.py`` sums the gradients of one step, bucket by bucket.
- ``exchange.py`` exchanges one number or tensor; errors name the rank.
- ``state.py`` holds the state that lasts from step to step: residuals and seeds.
- ``collective_schedules.py`` chooses a bucket's schedule. ``link.py`` measures how fast the links
  are; ``trial.py`` finds the faster of two schedules on live steps.
- ``deciding.py`` decides which method ``Adaptive`` uses, and ``adaptation.py`` runs the decisions.
- ``explain.py`` shows all this as a table.
"""
