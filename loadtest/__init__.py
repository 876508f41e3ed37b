"""The load generator: makes a workload, replays it against a server, and reports the results.

`bench/` is `penstock bench`, `workload/` makes requests, `report/` turns observations into numbers
and pages, `top/` is `penstock top`, `chat/` is `penstock chat`. It knows a server by HTTP alone:
nothing here imports penstock.server or penstock.engine. Of the scheduler it uses the errors.
"""
