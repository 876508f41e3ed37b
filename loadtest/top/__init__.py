"""`penstock top`: a live view of one server in a terminal.

Reads GET /metrics alone and imports nothing of the other folders of the load generator.
"""
