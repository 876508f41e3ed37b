"""Queries and latents between products and attention, and the products of each head."""
