"""Data that ships with the package: TOML, and no logic."""
