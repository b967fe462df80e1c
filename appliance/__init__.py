"""Take an HPC cluster's management node apart: a signed services container and a provisioning VM."""

__version__ = "0.1.0"
