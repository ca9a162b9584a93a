"""Runnable examples; installed as ``pccheck_async.examples``."""
