"""GPTQ: integers packed along the columns of a weight."""
