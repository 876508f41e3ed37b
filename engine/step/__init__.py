"""What a step reads and gives, and how executors take it."""
