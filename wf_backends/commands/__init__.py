"""The commands of the console script, one file each; they need the `cli` extra."""
