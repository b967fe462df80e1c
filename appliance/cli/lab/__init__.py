"""Verbs of the subject ``lab``: the one-machine cluster."""
