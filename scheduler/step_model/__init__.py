"""How long a step takes, from what it runs: fitted from steps that ran, or from a datasheet.

`amounts` is what a step runs, `samples` keeps steps that ran, `fit` finds the coefficients,
`analytic` computes them, and `model` predicts and knows how far off it is. `live` is what a server
uses, and `chunk_budget` asks it how much of a prompt fits a time.
"""
