"""AWQ: integers of 4 bits with zeros, packed along the rows of a weight."""
