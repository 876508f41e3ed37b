"""From config.json to a list of layers: the families, and the keys that they understand."""
