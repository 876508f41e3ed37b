"""Models: one architecture a file, and what reads their configuration and weights.

It knows one step's tokens; it does not know requests, sampling or how steps are scheduled.
"""
