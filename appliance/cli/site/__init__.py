"""Verbs of the subject ``site``: the site file, its keys and its certificate authority."""
