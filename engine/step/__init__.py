"""The input and the result of a step, and how executors take it."""
