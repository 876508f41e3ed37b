"""What ranks and stages have of a model."""
