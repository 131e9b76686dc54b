"""Accuracy: errors of cattn and its peers against a wider type. ``python -m benchmarks.accuracy`` measures them."""
