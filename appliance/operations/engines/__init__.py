"""Operations of the subject ``engines``: what other engines run, and how it gets there."""
