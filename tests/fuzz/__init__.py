"""Inputs that nobody would write by hand: `make test-fuzz` and `make test-schemas`."""
