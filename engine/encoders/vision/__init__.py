"""The vision towers of models that take images: patches in, rows for a decoder out."""
