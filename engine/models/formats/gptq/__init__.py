"""GPTQ: symmetric integers, packed along the columns of a weight."""
