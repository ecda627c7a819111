"""What a user calls: `attach` for a transformer of diffusers."""

from __future__ import annotations

from torch import nn

from wf_backends import SequenceParallel
from wf_diffusers.families import family_of
from wf_diffusers.hooks import TransformerHooks
from wf_transformers import Handle


def attach(model: nn.Module, sp: SequenceParallel) -> Handle:
    """Let a transformer of diffusers attend over the ranks of `sp`.

    The model is called with whole inputs, the same on every rank of a sequence, and gives the whole
    sample on every rank. Its tokens are cut where they enter, rotary embeddings with them, and
    brought together before the sample is made of them. Gradients of all parameters are to be
    averaged over the ranks, as data parallelism does, of a loss that every rank makes alike.

    Args:
        model: a model of `wf_diffusers.families`, with any attention backend.

    Raises:
        NotImplementedError: for another model. When called, for what cannot be cut: a ControlNet's
            residuals, an IP-Adapter, a timestep for each token, masks, dropout in training.
        ValueError: when called, if the ranks were not given the same inputs.
    """
    family, handle = family_of(model), Handle(sp)
    handle.advice = f"all {sp.size} ranks of a sequence draw the same noise and read the same data"
    with handle.removed_on_error():
        TransformerHooks(model, family, handle)
    return handle
