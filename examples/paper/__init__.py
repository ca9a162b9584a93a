"""Long programs: whole comparisons, and what reproduces the papers' figures. Each runs as a file and with ``-m``."""
