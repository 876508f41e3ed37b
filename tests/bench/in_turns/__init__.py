"""`python -m tests.bench.in_turns`: Penstock and other servers in turns, under the same load.

Each turn starts one server, warms it up, measures every case, and stops it: two servers never run
at the same time, and every turn of a server is like its others. It knows a server by its command
and by HTTP.
"""
