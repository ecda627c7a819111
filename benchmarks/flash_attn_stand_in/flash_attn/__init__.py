"""A stand-in for flash-attn on a CPU, for peers that import it; `benchmarks/peers.py` lends it."""

from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "2.7.4"  # whose signatures these are
