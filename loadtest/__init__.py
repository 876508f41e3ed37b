"""The load generator: makes a workload, replays it against a server, and reports the results.

`bench/` is `penstock bench`, `workload/` makes requests, `report/` turns observations into numbers
and pages, `top/` is `penstock top`, `chat/` is `penstock chat`. These know a server by HTTP alone
and import nothing of penstock.server or penstock.engine. `calibrate/`, `simulate/` and
`plan/` run the engine's own loop, so that what they predict is decided by the code that serves.
"""
