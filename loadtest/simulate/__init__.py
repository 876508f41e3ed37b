"""`penstock simulate`: a load on servers that need not exist, in virtual time.

The scheduler and the engine's loop are those that serve; only the executor is predicted. `replica`
is one server, `simulation` several behind a router, `outcome` what came of it, and the report is
that of `penstock bench`.
"""
