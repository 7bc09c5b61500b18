"""Clients of others, as they come, against the gateway of a mesh of two nodes."""
