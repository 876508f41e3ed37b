"""LoRA adapters as PEFT saves them: their settings, their weights, and those that are loaded."""
