# SPDX-License-Identifier: Apache-2.0
"""A stored state back into Python: new objects (``load``) or the live ones (``engine.restore``).

``live`` makes a tree of a live state, like the stored one. ``diff`` says how they differ and what is done with each
part; ``adapt`` knows modules and optimizers. ``bind`` knows addresses, makes the tensors that there are none of, and
calls both in their order. ``tree`` reads a skeleton, and ``arrays`` makes the memory that is read into.
"""
