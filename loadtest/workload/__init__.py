"""Requests from a seed or a file: prompts, lengths, arrival times. Sends and measures nothing."""
