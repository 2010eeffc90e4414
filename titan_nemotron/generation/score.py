"""Logits and log-probabilities of given tokens.

Shapes: B rows, L positions, V vocabulary.
"""

import torch
from torch import Tensor, nn

from titan_nemotron.layout import IGNORED, Batch, rows_of_tokens


@torch.no_grad()
def score(model: nn.Module, input_ids_BL: Tensor, document_ids_BL: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits fp32 [B, L, V], and log p of the next token inside the document, fp32 [B, L], 0 where there is none.

    Rows run one at a time, so that memory beyond the result is that of one row. Raises UserError for a wrong
    shape or type, for ids outside the vocabulary and for a document in two pieces.
    """
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    tokens_BL, layout = rows_of_tokens(input_ids_BL, document_ids_BL, vocabulary)
    tokens_BL, document_ids_BL = tokens_BL.cpu(), layout.document_ids.cpu()
    num_rows, length = tokens_BL.shape
    device = next(model.parameters()).device
    logits_BLV = torch.empty(num_rows, length, vocabulary)
    logprobs_BL = torch.zeros(num_rows, length)
    for row in range(num_rows):
        part = slice(row, row + 1)
        batch = Batch.from_rows(tokens_BL[part], document_ids_BL[part], length=length, mtp_depths=0)
        logits_BLV[part] = model(tokens_BL[part].to(device), document_ids_BL[part].to(device)).float().cpu()
        labels = batch.labels.clamp(min=0)[..., None]
        logprobs = torch.log_softmax(logits_BLV[part], -1).gather(-1, labels)[..., 0]
        logprobs_BL[part] = torch.where(batch.labels != IGNORED, logprobs, 0)
    return logits_BLV, logprobs_BL
