"""Tokens that may come next, found without a model, to be verified in one step.

A step reads all weights whatever it computes, so that a row of a few tokens takes little longer
than one of one. `sources` find drafts, `acceptance` knows how good they have been, `drafter`
decides how many are worth their time, and `placing` finds room for them.

Every token is drawn by one uniform of (seed, position), and a draft is accepted while the draw is
the draft: so answers are those without drafts, whatever a source says.
"""
