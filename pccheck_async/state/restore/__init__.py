"""A stored state back into Python: new objects (``load``) or the live ones (``engine.restore``).

``tree`` reads a skeleton, ``arrays`` makes the memory that is read into, ``objects`` handles modules and optimizers,
``match`` pairs live and stored values, and ``listing`` names the leaves for people.
"""
