"""Clusters of every kind and size with known truth: what their nodes need of the management node, whatever was seen.

    one = draw("xcat", 7)
    one.capture(), one.needs()

The truth is a property of the scenario (`needed.py`, `waits.py`): never the result of a rule of the classifier.
"""
