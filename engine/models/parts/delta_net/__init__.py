"""Gated delta nets: a recurrence in place of attention."""
