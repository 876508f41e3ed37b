"""The command `penstock`, and those of its commands that need no engine."""
