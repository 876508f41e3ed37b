"""The engine as a process of its own: the client in the server, the messages, the process."""
