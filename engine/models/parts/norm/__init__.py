"""RMSNorm, and where a layer has norms."""
