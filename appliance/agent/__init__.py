"""The agent: runs on admin hosts, next to the overlay. Python 3.9 and its standard library only.

``appliance.tools.agent`` packs this folder into one file, copies it to the host and starts it.
"""
