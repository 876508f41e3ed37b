"""The cost of the server: events, metrics, structured output, batching disciplines."""
