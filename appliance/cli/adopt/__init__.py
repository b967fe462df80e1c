"""Verbs that take over a live management node."""
