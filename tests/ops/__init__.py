"""What operators run beside the server, proved with the real programs: `make test-ops`."""
