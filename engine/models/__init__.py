"""Models: one architecture a file, and what reads their configuration and weights."""
