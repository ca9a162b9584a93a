# SPDX-License-Identifier: Apache-2.0
"""A stored state back into Python: new objects (``load``) or the live ones (``engine.restore``).

``live`` flattens a live state into a tree like the stored one. ``diff`` compares the two, and plans what is done with
each part; ``adapt`` has the rules for modules and optimizers. ``bind`` calls these in order, finds the addresses to
read into, and makes tensors that the live state lacks. ``tree`` reads a skeleton, and ``arrays`` allocates memory.
"""
