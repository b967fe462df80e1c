"""Real engines on one machine: Nomad and Kubernetes, on hosts of a lab or of their own."""
