"""Plans of the subject ``hosts``: checks of admin hosts."""
