"""Images of requests: where they come from, and what a model's image processor makes of them in
processes of their own."""
