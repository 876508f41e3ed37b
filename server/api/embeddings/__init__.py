"""Embeddings and similarity scores: routes, and many prompts through the engine at once."""
