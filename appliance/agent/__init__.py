"""What runs on an admin host beside its overlay: Python 3.6 and its standard library, nothing else.

``appliance.tools.agent`` packs this folder into one file, brings it there and starts it.
"""
