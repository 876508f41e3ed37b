"""What the server costs: events, metrics, structured output, batching disciplines."""
