"""Speaks HTTP, JSON and text. It reaches the engine through `engine/client.py` alone."""
