"""What users import: both engines, loading, and lazy reads.

It may import: tuning and what is below.
"""
