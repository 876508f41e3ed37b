"""Computes: token ids in, token ids out. It knows neither text nor HTTP."""
