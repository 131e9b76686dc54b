"""Bridges to other libraries, each in a module of its own that imports the library: none is needed to use cattn."""
