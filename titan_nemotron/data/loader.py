"""The loader: microbatches for one data rank, from a background process, with a state exact to the row.

loader = build_loader(config, tokenizer, sequence_length=4096, mtp_depths=2, rows_per_microbatch=1,
                      data_rank=0, data_degree=1, seed=0)
batch = next(loader)                 # endless for split="train"
state = loader.state_dict()          # of the last batch handed out; merge_states() joins those of all ranks
"""

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from titan_nemotron.data.config import DataConfig
from titan_nemotron.data.order import BadRecords
from titan_nemotron.data.reader import Plan, RowReader, Rows
from titan_nemotron.data.tokenizer import Tokenizer
from titan_nemotron.data.worker import Worker
from titan_nemotron.errors import UserError
from titan_nemotron.layout import Batch

logger = logging.getLogger(__name__)


def build_loader(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    mtp_depths: int,
    rows_per_microbatch: int,
    data_rank: int,
    data_degree: int,
    seed: int,
    split: str = "train",
) -> "Loader":
    """A loader of the `train` or the `validation` split for rank `data_rank` of `data_degree`.

    UserError when the sources cannot be read or hold nothing, and when the degree does not divide the number of streams.
    """
    if config.streams % data_degree:
        raise UserError(
            f"[data] streams = {config.streams}: {data_degree} data ranks do not divide it; make it a multiple"
        )
    if split == "validation" and not config.has_validation:
        raise UserError(
            "[data] validation_fraction = 0: there is nothing to validate on; raise it or name a [[data.validation_source]]"
        )
    return Loader(
        Plan(config, sequence_length, mtp_depths, rows_per_microbatch, data_rank, data_degree, seed, split), tokenizer
    )


class Loader(Iterator[Batch]):
    """Iterator of Batch (CPU tensors).

    train        endless, from where the state says; read by a background process unless [data] workers = 0
    validation   ends after the last held-out document; `iter()` starts again at the first batch. Read in this process and
                 kept, so that later rounds cost nothing; all ranks get the same number of batches (padding at the end)
    bad          the bad records met so far: count, and the first of them by name
    """

    def __init__(self, plan: Plan, tokenizer: Tokenizer) -> None:
        self.plan, self.tokenizer = plan, tokenizer
        self.bad = BadRecords()
        self._streams: dict[str, dict[str, Any]] = {}
        self._kept: list[Batch] = []
        self._next_kept = 0
        self._start(None)

    def _start(self, state: dict[str, Any] | None) -> None:
        plan, background = self.plan, self.plan.split == "train" and self.plan.config.workers > 0
        self._worker: Worker | None = None
        self._reader: RowReader | None = None
        if background:
            self._worker = Worker(plan, self.tokenizer.to_bytes(), state, plan.config.prefetch)
            self._finalizer = weakref.finalize(self, self._worker.close)  # also at exit
            self._num_documents = self._worker.receive()
        else:
            self._reader = RowReader(plan, self.tokenizer, state)
            self._num_documents = self._reader.num_documents

    def __iter__(self) -> "Loader":
        self._next_kept = 0
        return self

    def __next__(self) -> Batch:
        if self._next_kept < len(self._kept):
            self._next_kept += 1
            return self._kept[self._next_kept - 1]
        rows = self._read()
        if rows is None:
            raise StopIteration
        batch = Batch.from_rows(
            torch.from_numpy(rows.tokens).long(),
            torch.from_numpy(rows.document_ids).long(),
            length=self.plan.length,
            mtp_depths=self.plan.mtp_depths,
            scored=torch.from_numpy(rows.scored),
            target_bytes=rows.target_bytes,
        )
        self._streams.update(rows.states)
        if self.plan.split != "train":
            self._kept.append(batch)
            self._next_kept = len(self._kept)
        return batch

    def _read(self) -> Rows | None:
        if self._worker is not None:
            rows, bad = self._worker.receive()
        elif self._reader is not None:
            rows, bad = self._reader.read(), self._reader.bad
        else:
            raise ValueError("the loader is closed")
        for line in bad.named[len(self.bad.named) :]:
            logger.warning("bad record %s", line)
        self.bad = bad
        return rows

    def state_dict(self) -> dict[str, Any]:
        """{"order": what the order of documents depends on, "streams": {number: {...}}}: this rank's streams with rows."""
        return {"order": self._order(), "streams": {number: dict(entry) for number, entry in self._streams.items()}}

    def _order(self) -> dict[str, Any]:
        """What decides which rows come, beside the sources' contents and the length of a row."""
        return {
            "documents": self._num_documents,
            "seed": self.plan.seed,
            "streams": self.plan.streams,
            "shuffle_block": self.plan.config.shuffle_block,
            "validation_fraction": self.plan.config.held_out,
            "tokenizer": self.tokenizer.fingerprint[:16],
            "packing": self.plan.config.packing.model_dump(),
            "weights": [source.weight for source in self.plan.config.source],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind the rows of `state`, the states of all ranks merged; their number may have been another one.

        UserError when the sources, the seed or the number of streams have changed, or a rank's state is missing.
        """
        entries = {str(number): entry for number, entry in state["streams"].items()}
        order = self._order()
        for key, saved in state.get("order", {}).items():
            now = order.get(key)
            if saved != now:
                raise UserError(
                    f"[data]: the checkpoint's rows were made with {key} = {saved}, now it is {now}; restore it"
                )
        rows = {int(number): entry["rows"] for number, entry in entries.items()}
        total, streams = sum(rows.values()), self.plan.streams
        if any(rows.get(number, 0) != (total - number + streams - 1) // streams for number in range(streams)):
            raise UserError("the checkpoint's data state does not hold the streams of every rank")
        self.close()
        mine = {
            number: entry
            for number, entry in entries.items()
            if int(number) % self.plan.data_degree == self.plan.data_rank
        }
        self._streams = mine
        self._start({"streams": entries})

    def close(self) -> None:
        """Stop the background process. Called at exit too."""
        if self._worker is not None:
            self._finalizer()
        self._worker = self._reader = None


def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, for `load_state_dict` on any number of ranks."""
    merged: dict[str, Any] = {"order": {}, "streams": {}}
    for state in states:
        merged["order"].update(state.get("order", {}))
        merged["streams"].update({str(number): entry for number, entry in state["streams"].items()})
    return merged
