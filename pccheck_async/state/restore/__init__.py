"""A stored state back into Python: new objects (``load``) or the live ones (``engine.restore``).

A live state is a tree (``state.save.flatten``) like the stored one. ``diff`` says how they differ and what is done with
each part; ``adapt`` knows modules and optimizers, ``bind`` addresses, and calls them in their order. ``tree``
reads a skeleton, and ``arrays`` makes the memory that is read into.
"""
