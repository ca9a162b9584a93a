"""Comparing ways to save a training state: the same state, the same disk, the same clock for all of them."""
