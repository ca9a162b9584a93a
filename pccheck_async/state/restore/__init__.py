"""Stored leaves put back: into new memory for ``load``, into live objects for ``restore``."""
