"""A step: its loop and messages, its input and result, and how executors take it."""
