"""Classifications as people read them."""
