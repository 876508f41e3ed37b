"""GGUF files, llama.cpp's format: what their headers say, as the JSON files of a Hugging Face
directory. Knows no tensors, but what type, shape and place each has."""
