"""`penstock calibrate`: fits a step model to steps that ran, and writes it to a file.

The steps are those of a running server, or of a short sweep in this process. The file is what
`penstock simulate` predicts with.
"""
