"""Metrics, logs and traces: what is recorded while the server runs, and how it is exported.

Nothing here changes how a request is served. It imports no other room of the server, so every room
may use it.
"""
