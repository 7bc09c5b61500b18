"""Raw bfloat16 buffers to tensors and back, and whether they are numbers."""

from __future__ import annotations

import numpy as np
import torch

from meshnet.errors import BadFrame
from services.node.core.work import Buffer
from services.node.engine.precision import BOUNDARY_DTYPE


def write_rows(rows: torch.Tensor, buffer: Buffer) -> None:
    """Copies a buffer into bfloat16 `[n, hidden]` on the CPU: the one copy, which packing works together takes anyway.

    Raises BadFrame if it has another size.
    """
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if raw.nbytes != rows.nbytes:
        raise BadFrame(f"a buffer of {raw.nbytes} bytes is not {tuple(rows.shape)} of bfloat16")
    rows.view(torch.uint8).numpy().reshape(-1)[:] = raw


def to_buffer(rows: torch.Tensor) -> memoryview:
    """The bytes of `rows` as bfloat16; its own memory where that is what it is already."""
    rows = rows.to("cpu", BOUNDARY_DTYPE).contiguous()
    return rows.view(torch.uint8).numpy().reshape(-1).data


def is_finite(hidden: torch.Tensor) -> bool:
    """Whether no element is infinite or not a number."""
    # One pass; a sum may overflow where no element has.
    return bool(torch.isfinite(hidden.sum(dtype=torch.float32))) or bool(torch.isfinite(hidden).all())
