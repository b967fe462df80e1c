"""Plans of the subject ``hosts``: admin hosts: prepared, inspected."""
