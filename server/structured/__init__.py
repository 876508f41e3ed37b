"""Structured output: constraints on an answer, and the grammars for llguidance that enforce them.

It knows no HTTP, no wire types, no tools and no model.
"""
