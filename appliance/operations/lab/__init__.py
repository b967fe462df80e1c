"""Operations of the subject ``lab``: a cluster on one machine."""
