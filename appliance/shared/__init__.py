"""What both ends of a connection must agree on. Standard library only: it goes with the agent to admin hosts."""
