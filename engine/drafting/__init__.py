"""Drafts of next tokens that the executor proposes itself, once a step has sampled."""
