"""What a release is made of, built and tried: `make test-release`."""
