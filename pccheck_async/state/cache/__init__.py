"""Caches that make the second save of a state cheap: its tree, its layout, its fingerprints, its constant leaves."""
