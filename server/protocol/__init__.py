"""The wire types of every API, and the checks that need nothing but the fields themselves. It
knows no model and no engine."""
