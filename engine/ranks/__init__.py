"""Processes that compute a model together: rank 0 is the engine; each has some of the weights."""
