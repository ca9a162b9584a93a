"""Measuring a disk, and the choice of settings from what was measured.

It may import: training and what is below.
"""
