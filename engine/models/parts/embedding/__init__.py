"""The input embedding."""
