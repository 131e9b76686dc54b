"""The commands of ``python -m cattn``: the walk through the chapter, attention on files, and the configuration."""
