"""Teacher logits on disk: shards of packed windows, each there whole or not at all, read window by window.

A shard is a safetensors file: `windows` (n,) int64, which windows of the packed data; `data` uint8, the windows as
`codec.pack` made them, one after the other; `ends` (n,) int64, where each ends; `checksums` (n,) uint32, their CRC-32;
`rest` (n,) float32, the mean mass outside the k likeliest tokens.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from retrofox.data.packed import OPEN_MAPS, PackedDataset
from retrofox.support.files import replacing
from retrofox.training.offline.codec import id_type, unpack
from retrofox.training.offline.record import Record, read_record


def shard_file(folder: Path, number: int) -> Path:
    """The file of a shard."""
    return folder / f"shard-{number:06d}.safetensors"


@dataclass
class Written:
    """A shard's contents but for its data: window numbers (n,), their bytes and the mean mass of their rests."""

    windows: np.ndarray
    bytes: int
    rest: np.ndarray


def write_shard(file: Path, windows: np.ndarray, packed: Sequence[bytes], rest: Sequence[float]) -> None:
    """Writes a shard whole or not at all.

    Args:
        windows: (n,) numbers of the packed windows.
        packed: each as `codec.pack` made it.
        rest: the mean mass of each outside the k likeliest tokens.
    """
    arrays = {
        "windows": np.asarray(windows, np.int64),
        "data": np.frombuffer(b"".join(packed), np.uint8),
        "ends": np.fromiter(accumulate(map(len, packed)), np.int64),
        "checksums": np.fromiter(map(zlib.crc32, packed), np.uint32),
        "rest": np.asarray(rest, np.float32),
    }
    with replacing(file) as partial:
        save_file(arrays, partial)


def read_shard(file: Path) -> Written | None:
    """What a shard holds; None where there is none, or a damaged one."""
    try:
        with safe_open(file, framework="np") as shard:
            ends = shard.get_tensor("ends")
            return Written(shard.get_tensor("windows"), int(ends[-1]), shard.get_tensor("rest"))
    except (FileNotFoundError, SafetensorError):
        return None


class TeacherLogits:
    """The logits in a directory that `retrofox teacher` wrote, by window.

    Raises:
        ValueError: it is no such directory, or a file is damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.record: Record = read_record(self.folder)
        self.ids_as = id_type(self.record.vocabulary)
        self.files = sorted(self.folder.glob("shard-*.safetensors"))
        found = []
        for file in self.files:
            shard = read_shard(file)
            if shard is None:
                raise ValueError(f"{file} is damaged: delete it, and run `retrofox teacher` again to write it anew")
            found.append(shard.windows)
        windows = np.concatenate([np.zeros(0, np.int64), *found])
        self.sorter = np.argsort(windows, kind="stable")
        self.windows = windows[self.sorter]
        self.shard_of = np.repeat(np.arange(len(found)), [len(part) for part in found])
        self.place_of = np.concatenate([np.zeros(0, np.int64), *(np.arange(len(part)) for part in found)])
        self.opened: OrderedDict[int, Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": OrderedDict()}  # files are opened anew in each of a loader's processes

    def missing(self, windows: np.ndarray) -> int:
        """How many of these windows are not there."""
        return len(np.setdiff1d(windows, self.windows))

    def window(self, number: int) -> dict[str, torch.Tensor]:
        """`teacher_ids` (T, k) and `teacher_codes` (T, k + 1) of a window, see `codec.unpack`.

        Raises:
            ValueError: the file was damaged.
        """
        at = int(np.searchsorted(self.windows, number))
        if at == len(self.windows) or self.windows[at] != number:
            raise IndexError(f"window {number} is not in {self.folder}")
        index = int(self.sorter[at])
        shard, place = int(self.shard_of[index]), int(self.place_of[index])
        try:
            data, ends, checksums = self._open(shard)
            start, stop = (0, *ends.tolist())[place : place + 2]
            packed = data[start:stop].tobytes()
            if zlib.crc32(packed) != checksums[place]:
                raise ValueError("its checksum differs")
            ids, codes = unpack(packed, self.record.sequence_length, self.record.top_k, self.ids_as)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(
                f"{self.files[shard]}, window {number}, can't be read ({error}): delete the file, and run `retrofox "
                "teacher` again to write it anew"
            ) from error
        return {"teacher_ids": ids, "teacher_codes": codes}

    def _open(self, shard: int) -> tuple[Any, np.ndarray, np.ndarray]:
        """(data, read in slices; ends; checksums) of a shard; the least recently read is closed beyond OPEN_MAPS."""
        if shard in self.opened:
            self.opened.move_to_end(shard)
        else:
            file = safe_open(self.files[shard], framework="np")
            self.opened[shard] = (file.get_slice("data"), file.get_tensor("ends"), file.get_tensor("checksums"))
            if len(self.opened) > OPEN_MAPS:
                self.opened.popitem(last=False)
        return self.opened[shard]


class TaughtWindows(torch.utils.data.Dataset):
    """A packed data set's windows, each with its teacher's logits."""

    def __init__(self, dataset: PackedDataset, logits: TeacherLogits):
        self.dataset, self.logits = dataset, logits

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.dataset[index], **self.logits.window(index)}
