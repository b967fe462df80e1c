"""Take over a live management node."""
