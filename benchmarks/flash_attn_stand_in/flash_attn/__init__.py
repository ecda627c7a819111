"""A stand-in for flash-attn on a CPU; `benchmarks/peers.py` adds it to sys.path for its peers."""

from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["flash_attn_func"]
__version__ = "2.7.4"  # the version that has these signatures
