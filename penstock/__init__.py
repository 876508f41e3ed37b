"""Penstock as it is imported: the folders of the repository under one name (see pyproject.toml)."""
