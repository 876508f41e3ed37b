"""The room that speaks: text, JSON and HTTP. It knows the engine by its client alone."""
