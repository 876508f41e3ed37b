"""Mixtures of experts: routing, tiles of rows that share an expert, and their products."""
