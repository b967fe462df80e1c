"""Operations of the subject ``classify``: captures and their verdicts."""
