"""Long campaigns: run by hand, each prints its figures.

Modules named ``test_*`` run under ``pytest -m campaign``; the others with ``python -m tests.campaign.<name>``. Speeds
are ratios inside one run, since disks and machines differ from minute to minute.
"""
