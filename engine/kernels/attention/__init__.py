"""Attention over the paged KV pool: the protocols, and the backends that implement them.

It knows steps and the pool's layout; it does not know models, weights or sampling.
"""
