"""The demo model's files: weights, tokenizer, configuration and the record of their training."""
