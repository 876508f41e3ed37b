"""Asks hard questions: one workload, replayed against a target, and one report with the answers."""
