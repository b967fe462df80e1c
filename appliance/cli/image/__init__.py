"""Verbs of the subject ``image``: images of the services container: built, verified, listed."""
