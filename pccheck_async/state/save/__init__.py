# SPDX-License-Identifier: Apache-2.0
"""Preparing a state for a checkpoint: flattening it, splitting it into eager and lazy leaves, finding torn captures."""
