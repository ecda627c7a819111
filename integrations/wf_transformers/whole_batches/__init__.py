"""Models that are called with whole batches and compute this rank's part of them.

Shapes: b batch, s tokens of this rank, S tokens of the whole sequence.
"""
