"""Operations of the subject ``overlay``: the overlay of the services container, and its mirror."""
