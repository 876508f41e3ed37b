"""The fallback: families without a row in `engine/models/families/families.py`, computed by the
classes of transformers, over our paged pool of keys and values.

A class that hands its attention to transformers' registry is asked to call ours. What it computes
besides is its own, and is checked at each start: see `check`.
"""
