"""Servers whose engines are killed, stopped and misled under load: `make test-chaos`."""
