"""Runs a model on several ranks and on one rank, and compares outputs and gradients.

Shapes: b batch, s tokens of this rank, S tokens of the whole sequence.
"""
