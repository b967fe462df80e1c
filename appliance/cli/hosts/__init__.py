"""Verbs of the subject ``hosts``: prepare and inspect admin hosts."""
