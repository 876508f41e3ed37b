"""Memory and hardware: the KV pool, what the machine may use, what a device can reach. It knows no
requests."""
