"""Metrics, logs and traces: what is recorded while the server runs, and how it is exported.

Nothing here changes how a request is served. It imports nothing else of the server, so every other
folder may use it.
"""
