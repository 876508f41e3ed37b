"""Generates the demo model's training text and trains the model; the product never imports it."""
