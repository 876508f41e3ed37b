"""`penstock top`: a live view in a terminal, read from /metrics alone."""
