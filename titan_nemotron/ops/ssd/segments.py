"""Where the scan restarts.

Shapes: B rows, L positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def segments(document_ids_BL: Tensor) -> Tensor:
    """Numbers the documents of a row 0, 1, 2, ...; padding carries the number of the document before it. [B, L] int64.

    Leading padding has number 0, as has the first document: a state that comes in belongs to it.
    """
    valid = document_ids_BL >= 0
    index = torch.arange(document_ids_BL.shape[1], device=document_ids_BL.device)
    last = torch.where(valid, index, -1).cummax(1).values  # the last valid position up to here
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    restart = valid & (before >= 0) & (document_ids_BL != document_ids_BL.gather(1, before.clamp_min(0)))
    return restart.cumsum(1)
