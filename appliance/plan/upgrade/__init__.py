"""Plans of the subject ``upgrade``: upgrades and rehearsals."""
