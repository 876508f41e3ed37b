"""Quantized formats against their own packages, and through HTTP: `make test-models` runs these."""
