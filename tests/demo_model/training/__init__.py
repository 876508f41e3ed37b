"""The program that writes the demo model's text and trains it."""
