"""Plans of the subject ``migration``: migration, failover, lease and fencing."""
