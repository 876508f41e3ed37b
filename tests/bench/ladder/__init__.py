"""The GPU suite's ladder, climbed for real at toy sizes: `make test-ladder`."""
