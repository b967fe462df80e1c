"""Plans of the subject ``nodes``: nodes: inventory, discovery, power, node images, files, users."""
