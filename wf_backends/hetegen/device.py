"""What the runner asks of a device: three lanes, memory, and how tensors get from side to side.

    copy(rows, pinned, slab, after)  on the link: rows of a weight into a slab, through pinned
                                     memory if it is not None
    compute(run, nbytes, after)      on the accelerator: run(), which reads so much of a weight
    on_host(write, x, out, nbytes)   on the host: write(x, out), of x and out on the accelerator
    wait(events)                     what the caller does next comes after these; when they were due
    now()                            the moment after what the caller has done so far
    seconds(start, end)              between two moments; waits for them
    rates(dtype)                     of its lanes, for one token and weights of a type
    pinned(nbytes)                   pinned memory, (nbytes,) uint8; MemoryError if none is left
    place(tensor)                    a copy in the accelerator's memory
    stop(), close()                  end the lanes' threads; give all memory back as well

`copy`, `compute` and `on_host` return at once, with an event: the end of their work. What that
raises, `wait` raises. `after` is the event of the work before it on its slab, None for none.
"""

from __future__ import annotations

from typing import Any

from wf_backends.hetegen.accelerator import Accelerator
from wf_backends.hetegen.shaped import ShapedDevice

Device = Accelerator | ShapedDevice
Event = Any  # only the device that made it looks inside
Moment = Any  # of the caller's time
