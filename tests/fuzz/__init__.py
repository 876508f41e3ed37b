"""Generated inputs: `make test-fuzz` and `make test-schemas`."""
