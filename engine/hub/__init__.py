"""Which model is served: hub ids, downloads, directories, the list of models, and their checks."""
