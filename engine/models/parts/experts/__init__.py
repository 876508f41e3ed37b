"""Mixtures of experts, with a shared one or beside an MLP."""
