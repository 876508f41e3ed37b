"""Helpers that tests share. No test is in this folder."""
