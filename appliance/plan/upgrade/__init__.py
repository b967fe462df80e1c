"""Plans of the subject ``upgrade``: phases and predicted outage of an upgrade."""
