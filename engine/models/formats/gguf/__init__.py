"""The types of tensors in GGUF files: what blocks stand for, and the layers of their codes."""
