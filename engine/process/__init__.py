"""All that any process of the engine has: its log, its parent, the phases of its start."""
