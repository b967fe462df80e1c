"""Split an HPC cluster's management node into a signed services container and a provisioning VM."""

__version__ = "0.1.0"
