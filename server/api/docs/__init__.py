"""`/openapi.json`, and the pages that show it."""
