"""Events, log lines, spans and progress: primitives that know no engine.

It may import: errors only.
"""
