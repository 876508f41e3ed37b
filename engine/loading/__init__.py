"""How a model gets into memory: the one sequence of a start, and what it finds out."""
