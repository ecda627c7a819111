"""HeteGen (arXiv 2403.01164): inference in which the host computes its share of every linear."""
