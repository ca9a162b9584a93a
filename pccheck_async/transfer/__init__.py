"""Moving bytes: buffers, copies between memories, and I/O operations.

It may import: state and what is below.
"""
