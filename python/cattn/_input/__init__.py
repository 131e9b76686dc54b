"""Arguments of users, made ready for the extension: arrays, checks, types and the floating-point mode."""
