"""Operations of the subject ``image``: build, verify and list images of the services container."""
