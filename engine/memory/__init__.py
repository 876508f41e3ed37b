"""Memory and hardware: the KV pool, the memory and cores available, what a device can reach.

It knows no models but the KV pool's `KVShape`, and no requests.
"""
