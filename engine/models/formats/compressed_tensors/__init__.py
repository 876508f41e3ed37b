"""compressed-tensors, the format of LLM Compressor, and its integers."""
