"""The flags of `penstock serve`: their help, their values, and the config that they make."""
