"""The files for operators, tested with the real programs: `make test-ops`."""
