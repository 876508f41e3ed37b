"""The weights of a GGUF file as tensors and linear layers; `engine/files/gguf` has its header."""
