"""OpenAI's completions and chat completions: routes, and the writer of their answers."""
