"""`penstock bench`: replays a workload against a server and measures its responses.

Owns the flags, HTTP and SSE, the replay and the sweep. How requests are made and how results are
reported is in `workload/` and `report/`.
"""
