"""All around a training step: the step context, accumulation, policies, preemption, resumable data.

It may import: engine and what is below.
"""
