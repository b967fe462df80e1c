"""Code that runs on both ends of a connection. Standard library only: it is copied to admin hosts with the agent."""
