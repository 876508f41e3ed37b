"""Blocks outside of the pool: in the host's memory, and on disk."""
