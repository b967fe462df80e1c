"""What runs in the provisioning VM: the inventory, boot scripts, files and images over HTTP.

This room goes into the VM as it is and runs there on Debian 12's own packages, so it imports nothing of ours
but the leaves, and is written for old releases (Starlette 0.26, SQLAlchemy 1.4) and new ones alike.
"""
