"""The suite of GPU measurements."""
