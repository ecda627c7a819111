"""Families of models: what is known of their layers, and how each is spread over ranks."""
