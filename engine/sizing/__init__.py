"""Arithmetic tells what a model needs of devices that are not there."""
