"""Divides a model among ranks and stages."""
