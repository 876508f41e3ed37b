"""Packs the weights of a model's parts into the structures that the C++ of each part reads."""
