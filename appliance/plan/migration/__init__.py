"""Plans of the subject ``migration``: to another admin host: migration, failover, lease, fencing."""
