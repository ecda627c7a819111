"""The options of a block that save memory in training: tiles and activation checkpoints."""
