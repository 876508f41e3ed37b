"""The routes: each API turns its own requests into generation requests, and outputs into its own
words. It knows nothing of scheduling or tensors."""
