"""Deterministic 64-bit mixing: held-out decisions and document orders that are the same on every machine and rank."""

import hashlib

import numpy as np

MASK = (1 << 64) - 1


def name_hash(name: str) -> int:
    """64 bits of BLAKE2b of the UTF-8 name."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def prompt_key(tokens: np.ndarray) -> int:
    """64 bits of XXH3 of token ids [N]: equal for equal prompts, on every machine and in every run."""
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(tokens.data)


def mix(value: int) -> int:
    """SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection of 64-bit integers without visible structure."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def mix_array(values: np.ndarray) -> np.ndarray:
    """`mix` of every element; uint64 [N] -> uint64 [N]."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def record_keys(file_hash: int, start: int, stop: int) -> np.ndarray:
    """Keys of the records start..stop of one file; uint64."""
    return mix_array(np.arange(start, stop, dtype=np.uint64) ^ np.uint64(file_hash))


def held_out(keys: np.ndarray, fraction: float) -> np.ndarray:
    """True where a document belongs to validation; keys are uniform in [0, 2^64)."""
    return keys < np.uint64(min(int(fraction * 2.0**64), MASK))


def permuted(index: int, size: int, key: int) -> int:
    """The place of `index` in a pseudo-random permutation of range(size) chosen by `key`, without a table.

    A Feistel network on the next power of four, walked until it falls back inside range(size) (Black and Rogaway 2002):
    constant memory for any number of documents, and any position can be asked for directly after a resume.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = index
    while True:
        left, right = value >> half, value & mask
        for number in range(6):
            left, right = right, left ^ (mix(key + right * 0x100 + number) & mask)
        value = (left << half) | right
        if value < size:
            return value
