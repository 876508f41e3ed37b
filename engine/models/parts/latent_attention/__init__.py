"""Latent attention: all heads read one short vector of each token."""
