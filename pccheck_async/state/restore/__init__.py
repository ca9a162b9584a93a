"""A stored state back into Python: new objects (``load``) or the live ones (``engine.restore``).

``tree`` reads a skeleton, ``arrays`` makes the memory that is read into, ``objects`` knows modules and optimizers,
``match`` decides what is filled with what, and ``listing`` names the leaves for people.
"""
