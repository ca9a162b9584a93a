"""The order of one checkpoint: admit, capture, write, commit, end; and of a restore.

It may import: store and what is below; it knows policies only as a protocol, and nothing of training steps.
"""
