"""The input embedding, and the final norm and output layer: what has a row for each id."""
