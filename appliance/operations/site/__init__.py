"""Operations of the subject ``site``: site file, keys and certificate authority."""
