"""The service in the provisioning VM: inventory, boot scripts, files and images over HTTP.

This package is copied into the VM and runs there on the packages of Debian 12. It may import only the leaf modules
and `shared`, and must work with old releases (Starlette 0.26, SQLAlchemy 1.4) and new ones.
"""
