"""Decides, at every step, which tokens of which sequences run. Standard library only."""
