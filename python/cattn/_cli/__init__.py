"""What ``python -m cattn`` does: the walk through the chapter, attention on files, and a look at the machine."""
