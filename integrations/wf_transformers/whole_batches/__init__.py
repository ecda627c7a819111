"""Models that are called with whole batches and compute this rank's part of them."""
