"""What is asked of a server, and when: arrivals, prompts, lengths."""
