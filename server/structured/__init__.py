"""Structured output: JSON schemas, regular expressions and grammars in the notation of llguidance.
It knows no HTTP and no model."""
