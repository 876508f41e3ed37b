"""What a model needs of devices that are not there: arithmetic alone."""
