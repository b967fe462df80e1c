"""Generated captures for the tests: frames, capture files of every format, and the traffic of a whole cluster.

Everything is deterministic: the same call gives the same bytes on every machine.
"""
