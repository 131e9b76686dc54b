"""From what a user passes to what the extension takes: arrays, checks, types and floating-point mode."""
