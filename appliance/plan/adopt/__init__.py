"""Take over a live management node: what it has, and the site file for it."""
