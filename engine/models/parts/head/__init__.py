"""The final norm and the output layer."""
