"""Does a model give on several ranks what it gives on one? It is run both ways and compared."""
