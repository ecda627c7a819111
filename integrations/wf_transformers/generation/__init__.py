"""Generation over ranks: `generate` with a cache whose keys and values lie on all ranks.

The prompt is cut over the ranks and runs as in training. From then on every rank computes all new
tokens, and their attention covers the keys of all ranks (`wf_backends.decode`).
"""
