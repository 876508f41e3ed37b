"""The inputs that each layer of Gemma 4 E2B and E4B has of its own."""
