"""Computes: token ids in, token ids out. It has never heard of text or HTTP."""
