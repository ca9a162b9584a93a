# SPDX-License-Identifier: Apache-2.0
"""Caches that make the second save of a state cheap: its outline, its layout, its constant leaves."""
