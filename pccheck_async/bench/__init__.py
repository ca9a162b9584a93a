"""Benchmarks: tables of raw repetitions, the figures drawn from them, models over them, and timelines of runs."""
