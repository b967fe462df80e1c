"""Verbs of the subject ``migration``: migrate and failover."""
