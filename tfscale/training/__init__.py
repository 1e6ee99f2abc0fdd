"""How a model is trained: optimizers, their rate schedules, recomputation, attacks."""
