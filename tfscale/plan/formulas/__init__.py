"""Published formulas of parallel training, each with its paper: the arithmetic behind ``plan``."""
