"""Verbs of the subject ``engines``: other engines that run the services."""
