"""Plans of the subject ``image``: images of the services container."""
