"""From logits to token ids: the sampler, token bans, grammars, and the outputs of prompts.

It knows slots and logits; it does not know models, blocks or text.
"""
