"""Benchmarks: what the product takes, against a named peer measured in the same run.

Every module of this package with a function ``measure(rig)`` is a benchmark; ``rig`` holds what they share.
"""
