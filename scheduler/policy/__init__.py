"""Decides who runs next, and when: the order of the queue, fairness, targets, forecasts."""
