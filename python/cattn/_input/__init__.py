"""Arguments of users, made ready for the extension: arrays, checks, types, rng and floating-point mode."""
