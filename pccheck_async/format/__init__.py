"""The bytes of a store, purely: record, manifest, skeleton, dtypes, keys, checksum.

No await and no file descriptor. It may import: errors.
"""
