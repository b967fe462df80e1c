"""Verbs of the subject ``upgrade``: upgrade and rehearse."""
