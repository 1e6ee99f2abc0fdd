"""Teams of replicas, and the sums of a step's gradients and statistics over a team.

- ``team.py``: replicas that sum, gather, scatter and mix together; ``tensorflow_team.py`` runs
  TensorFlow's collectives for them, if ``backends.py`` chooses these; ``lost_ranks.py`` ends them
  when a worker is lost. ``rows.py`` sums rows of tables.
- ``reducer.py`` sums the gradients of one step. ``buckets.py`` decides which gradients are sent
  together; ``bucket_sum.py`` sums one bucket; ``background.py`` sums while steps go on.
- ``lookups.py`` and ``dataflow.py`` find the tables whose rows all replicas look up alike.
- ``slots.py`` declares, saves and frees arrays that outlive a step, such as residuals and seeds.
- ``collective_schedules.py`` chooses a bucket's schedule. ``link.py`` measures how fast the links
  are; ``trial.py`` finds the faster of two schedules on live steps.
- ``packing.py`` describes all this, and ``explain.py`` shows the description as a table.
- ``scaling.py`` is the interface of a strategy for the rooms below it.
"""
