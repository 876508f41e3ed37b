"""Metrics, logs, traces. They are told of what happens and change nothing."""
