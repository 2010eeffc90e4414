"""The load of every expert as one picture, for TensorBoard.

Shapes: C routed calls, E experts, H and W pixels.
"""

import struct
import zlib
from collections.abc import Mapping

import numpy as np
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

# Multiples of an even load, and their colours: no token black, little blue, even white, much orange, and from 4 on dark red.
LOADS = (0.0, 0.5, 1.0, 2.0, 4.0)
COLOURS = ((0, 0, 0), (40, 90, 200), (255, 255, 255), (250, 140, 30), (130, 0, 20))
GREY = 128  # between cells, and where a call has no such expert
CELL, LEAST_CELL, WIDTH = (
    24,
    4,
    1024,
)  # pixels: a side of a cell, its least width, and the width that many experts share


def expert_heatmap(counts: Mapping[str, Tensor]) -> np.ndarray:
    """[H, W, 3] uint8: a row for each routed call, in their order, a column for each expert, and below them the scale.

    The colour of a cell is its load as a multiple of the call's mean, see LOADS. The scale goes from 0 to 4.
    """
    num_experts = max(len(count_E) for count_E in counts.values())
    width = min(CELL, max(LEAST_CELL, WIDTH // num_experts))
    loads_CE = np.full((len(counts), num_experts), np.nan)
    for load_E, count_E in zip(loads_CE, counts.values()):
        load_E[: len(count_E)] = (count_E / count_E.mean().clamp(min=1e-9)).cpu().numpy()
    cells = np.kron(colours(loads_CE), np.ones((CELL, width, 1))).astype(np.uint8)
    cells[CELL - 1 :: CELL] = GREY
    cells[:, width - 1 :: width] = GREY
    scale = colours(np.linspace(LOADS[0], LOADS[-1], cells.shape[1])[None]).repeat(CELL // 2, 0)
    gap = np.full((CELL // 2, cells.shape[1], 3), GREY, np.uint8)
    return np.concatenate([cells, gap, scale])


def colours(loads: np.ndarray) -> np.ndarray:
    """[..., 3] uint8 of multiples of an even load, linear between LOADS; grey for NaN."""
    channels = [np.interp(loads, LOADS, channel) for channel in zip(*COLOURS)]
    return np.nan_to_num(np.stack(channels, -1), nan=GREY).round().astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """[H, W, 3] uint8 as a PNG file."""
    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], 1)  # filter 0 before each row

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # eight bits, RGB
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows.tobytes())), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def add_heatmap(board: SummaryWriter, tag: str, image: np.ndarray, step: int) -> None:
    """Like SummaryWriter.add_image, which needs Pillow."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    height, width, _ = image.shape
    encoded = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(image))
    board._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=encoded)]), step)
