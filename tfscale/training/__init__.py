"""Parts of a training: optimizers, their rate schedules, recomputation, attacks on samples."""
