"""Which route is the cheapest: today by the bytes that a rank sends, whatever the mask.

Pure: standard library only.
"""

from __future__ import annotations

from typing import Any


def units_sent(rows: int, cols: int, kv: float, gamma: float = 1.0) -> float:
    """Units (bytes of one rank's Q) that a rank sends, forward and backward, for a full mask.

        forward (a - 1)(1 + gamma) + 2 kv (b - 1)
        backward (a - 1)(2 + gamma) + 2 kv (b - 1)(1 + gamma)

    Args:
        rows, cols: a query shards and b key shards meet on a rank.
        kv: key heads / query heads.
        gamma: bytes of a partial result on the wire / bytes of an activation.

    Source: DeepSpeed-Ulysses, StarTrail and Mesh-Attention count the same way.
    """
    forward = (rows - 1) * (1 + gamma) + 2 * kv * (cols - 1)
    backward = (rows - 1) * (2 + gamma) + 2 * kv * (cols - 1) * (1 + gamma)
    return forward + backward


def cheapest_route(size: int, kv: float, gamma: float = 1.0) -> dict[str, Any]:
    """The route for `size` ranks that sends the fewest bytes; the ring where it is as cheap."""
    shapes = [(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0]
    rows, cols = min(shapes, key=lambda shape: units_sent(*shape, kv, gamma))
    return {"name": "ring"} if rows == 1 else {"name": "mesh", "rows": rows, "cols": cols}
