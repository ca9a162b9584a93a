"""Comparing ways to save a training state: measured side by side, drawn, and modelled."""
