"""Anthropic's Messages API: routes and writer."""
