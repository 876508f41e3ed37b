"""`penstock bench`: replays a workload against a server and measures what comes back."""
