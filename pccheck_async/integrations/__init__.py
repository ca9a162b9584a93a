# SPDX-License-Identifier: Apache-2.0
"""One module per framework around training; each is imported by its name, and imports that framework.

It may import: api, training and the rooms below.
"""
