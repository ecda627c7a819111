"""Models from a folder or a name: their sizes, their graph without memory, their weights."""
