"""Verbs of the subject ``vm``: the provisioning VM."""
