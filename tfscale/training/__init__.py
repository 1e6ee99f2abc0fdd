"""Parts of a training: optimizers, rate schedules, recomputation, attacks, very many classes."""
