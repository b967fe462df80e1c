"""What other engines run the services with, rendered from the catalogue and the site file; no effects."""
