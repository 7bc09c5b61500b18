"""Meshes over slow links."""
