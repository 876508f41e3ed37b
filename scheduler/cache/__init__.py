"""Which blocks hold which tokens: pools, prefixes, groups, states, tiers."""
