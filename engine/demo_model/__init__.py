"""The demo model: its weights, and the seeded program that writes its text and trains it."""
