"""Verbs of the subject ``services``: start, stop, query and guard the services container."""
