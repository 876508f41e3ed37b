"""The demo model: weights, configuration and tokenizer. Data only; tests/demo_model trains it."""
