"""Third-party clients, installed as their users do, against a real `penstock serve`."""
