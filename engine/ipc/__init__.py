"""The engine as a process of its own: its life, the open streams, and what joins them for the
server. Knows messages and nothing of what a step computes."""
