"""Other people's clients, as their users install them, against a real `penstock serve`."""
