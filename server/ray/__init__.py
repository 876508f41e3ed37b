"""Several replicas of the server, in Ray Serve. Nothing else of Penstock imports Ray.

HAProxy, which Ray Serve starts, takes the connections. It asks one process for each request which
replica is to answer, and then connects the client with that replica: tokens pass no Python but the
replica's own.
"""
