"""Plans of the subject ``snapshots``: snapshots of the overlay."""
