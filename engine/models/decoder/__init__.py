"""The decoder: layers of parts in torch, and on a GPU with few kernel launches."""
