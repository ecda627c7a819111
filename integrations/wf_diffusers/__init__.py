"""WallFacer for the transformers of diffusers.

handle = wf_diffusers.attach(model, sp)
sample = model(**inputs).sample  # whole inputs and a whole sample on every rank
"""

from wf_diffusers.entry import attach
from wf_transformers import Handle

__all__ = ["Handle", "attach"]
