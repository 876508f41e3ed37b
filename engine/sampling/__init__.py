"""From logits to token ids: samplers, token bans, grammars, and what is read of prompts."""
