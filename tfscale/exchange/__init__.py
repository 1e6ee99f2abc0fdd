"""How a step's gradients and statistics reach all replicas.

- ``buckets.py``: which gradients travel together.
- ``lookups.py``, ``dataflow.py``: rows of tables that all replicas look up alike.
- ``reducer.py``: one step's gradients, bucket by bucket.
- ``exchange.py``: one number or tensor, with errors that name the rank.
- ``state.py``: what lasts from step to step: residuals and seeds.
- ``collective_schedules.py``: which schedule a bucket gets, with ``link.py`` (how fast the links
  are) and ``trial.py`` (which of two schedules is faster on live steps).
- ``deciding.py``, ``adaptation.py``: which method ``Adaptive`` takes, and how that runs.
- ``explain.py``: the table that tells all this.
"""
