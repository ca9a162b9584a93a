# SPDX-License-Identifier: Apache-2.0
"""A state on its way into a checkpoint: flattened, split into eager and lazy leaves, and checked for torn captures."""
