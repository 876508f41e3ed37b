"""Products with weights that are codes of 8 or 4 bits, and the numbers that these stand for."""
