# SPDX-License-Identifier: Apache-2.0
"""Data sets that are read in blocks while a run trains or evaluates: data behind URLs, larger than the local disk.

The order of the rows is that of `data.order.StreamOrder`. The rows of the windows at which a process is, and of the
next ones, are in a `block_cache.BlockCache` (docs/decisions/0022-streaming.md).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_jax.data import records
from bert_jax.data.blocks import Blocks, RowSource
from bert_jax.data.order import StreamOrder, StreamWindow, choose_streams
from bert_jax.data.records import About, Dataset
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import DataConfig
from bert_jax.storage import urls
from bert_jax.storage.block_cache import BlockCache
from bert_jax.storage.ranges import RangeReader
from bert_jax.storage.resolve import resolve

_HELDOUT_SHARE = 8  # the held-out split gets at most an eighth of the cache
_BLOCKS_AHEAD = 16  # of a split that is read in order
_FEWEST_BLOCKS = 2


def open_for_training(
    config: DataConfig, paths: Sequence[str], batch_sizes: Sequence[int]
) -> tuple[list[Dataset], str]:
    """Returns the data set of each phase of a run, and the setting `data.stream` of the run: "on" if they are streamed.

    Raises: InputError if a data set cannot be read, or cannot be streamed as the settings ask for.
    """
    abouts = [records.open_about(resolve(path), verify=config.verify) for path in paths]
    large = any(is_large(about, config) for about in abouts)
    if config.stream == "off" or (config.stream == "auto" and not large):
        return [records.open_rows(about, config.verify) for about in abouts], config.stream
    datasets = []
    # of each data set, so that a second phase goes on in the order of the first
    streams: dict[str, int] = {}
    for about, batch_size in zip(abouts, batch_sizes, strict=True):
        contents = " ".join(shard["sha256"] for shard in about.shards)
        num_streams = streams.setdefault(contents, choose_streams(config.streams, batch_size))
        datasets.append(open_streamed(about, config, num_streams))
    return datasets, "on"


def open_in_order(
    path: str | Path, tokenizer_fingerprint: str = "", cache_gb: float = DataConfig.cache_gb
) -> Dataset:
    """Returns a data set that is read from its first row to its last, once or a few times; close it at the end.

    At a URL nothing but the manifest, the tokenizer and the counts of tokens is copied. The rows of a split are read in
    blocks, each checked by its checksum, of which at most `cache_gb` gigabytes are on the local disk at a time. Data
    sets of versions without checksums of blocks are copied whole.

    Raises: InputError as `records.open_dataset`, or if `cache_gb` is too small for two blocks.
    """
    about = records.open_about(resolve(path), tokenizer_fingerprint)
    if not about.url or not all("blocks" in shard for shard in about.shards):
        return records.open_rows(about)
    remote = {}
    limit = int(min(2.0**60, cache_gb * 1e9))  # min(x, NaN) is x; the check below refuses NaN
    for name in ("train", "heldout"):
        split = about.manifest["splits"][name]
        blocks = Blocks(split["shards"], about.dtype)
        needed = _FEWEST_BLOCKS * blocks.most_rows * about.dtype.itemsize
        if not cache_gb * 1e9 >= needed:
            raise InputError(
                f"cache_gb {cache_gb:g} is too small for two blocks of {path}; set it to {needed / 1e9:g}"
            )
        remote[name] = RemoteRows(about, blocks, split["sequences"], limit, verify=True)
    return Dataset(
        about.path, about.manifest, remote["train"], remote["heldout"], about.token_counts
    )


def is_large(about: About, config: DataConfig) -> bool:
    """Returns whether a data set is at a URL, and larger than the cache."""
    return bool(about.url) and about.num_bytes > config.cache_gb * 1e9


def open_streamed(about: About, config: DataConfig, num_streams: int) -> Dataset:
    """Returns a data set, at a URL or on this machine, with the order of streams.

    Raises: InputError if it cannot be read, or if the cache is too small.
    """
    splits = about.manifest["splits"]
    itemsize = about.dtype.itemsize
    blocks = {name: Blocks(splits[name]["shards"], about.dtype) for name in ("train", "heldout")}
    window_rows = max(
        int(config.window_mb * 2**20) // (itemsize * num_streams), blocks["train"].most_rows, 1
    )
    order = StreamOrder(blocks["train"].rows, num_streams, window_rows, config.seed)
    if not about.url:
        local = records.open_rows(about, config.verify)
        return dataclasses.replace(local, train=StreamedSplit(local.train, order, blocks["train"]))
    if config.verify and not all("blocks" in shard for shard in about.shards):
        problem = f"{about.url} was made by an earlier version: its blocks have no checksums"
        raise InputError(
            f"{problem}; prepare it again, or set data.verify=False, or data.stream=off"
        )
    limit = int(config.cache_gb * 1e9)
    heldout_limit = min(
        limit // _HELDOUT_SHARE,
        (len(blocks["heldout"].rows) + 1) * blocks["heldout"].most_rows * itemsize,
    )
    limits = {"train": limit - heldout_limit, "heldout": heldout_limit}
    remote = {
        name: RemoteRows(
            about, blocks[name], splits[name]["sequences"], limits[name], config.verify
        )
        for name in blocks
    }
    train = StreamedSplit(remote["train"], order, blocks["train"], config)
    return Dataset(about.path, about.manifest, train, remote["heldout"], about.token_counts)


class RemoteRows:
    """The rows of a split behind a URL, read in blocks when they are asked for, and those after them ahead."""

    def __init__(self, about: About, blocks: Blocks, num_sequences: int, limit: int, verify: bool):
        self.dtype = about.dtype
        self.num_sequences = num_sequences
        self.num_rows = int(blocks.rows.sum())
        self._url = about.url
        self._blocks = blocks
        self._limit = limit
        self._verify = verify
        self._ahead = np.empty(0, np.int64)

    @functools.cached_property
    def cache(self) -> BlockCache:
        """The blocks on the local disk. Nothing is read before the first use."""
        blocks = self._blocks
        reader = RangeReader(self._url)
        slot_bytes = blocks.most_rows * self.dtype.itemsize
        num_slots = min(self._limit // slot_bytes, len(blocks.rows) + 1)
        if num_slots < min(_FEWEST_BLOCKS, len(blocks.rows)):
            needed = _FEWEST_BLOCKS * _HELDOUT_SHARE * slot_bytes / 1e9
            raise InputError(
                f"data.cache_gb is too small for the blocks of {self._url}; set it to {needed:.2f}"
            )

        def fetch(number: int) -> bytes:
            return blocks.read(reader, number, self._verify)

        return BlockCache(
            fetch, blocks.most_rows, self.dtype.itemsize, num_slots, urls.user_cache() / "streams"
        )

    def gather(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], in their order, and reads the blocks after them ahead.

        Raises: InputError or StoppedError if they cannot be read, with the reason.
        """
        if not len(row_indices):
            return np.empty(0, self.dtype)
        homes = np.searchsorted(self._blocks.ends, row_indices, side="right")
        last = int(homes.max())
        count = min(_BLOCKS_AHEAD, self.cache.num_slots // 4)
        ahead = np.arange(last + 1, min(last + 1 + count, len(self._blocks.rows)))
        # In this order: a block that is wanted again must not be let go between the two.
        self.cache.want(ahead, due=0)
        self.cache.release(self._ahead)
        self._ahead = ahead
        return self.take(row_indices, homes)

    def take(self, row_indices: np.ndarray, homes: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], which are in blocks `homes` [n]."""
        places = row_indices - (self._blocks.ends - self._blocks.rows)[homes]
        return self.cache.gather(homes, places).view(self.dtype)[:, 0]

    def close(self) -> None:
        """Stops reading and frees the disk space."""
        if "cache" in self.__dict__:
            self.cache.close()


@dataclass(frozen=True)
class _Held:
    """The windows of a stream that are kept: the one it is at, and the next."""

    window: StreamWindow
    blocks: np.ndarray


class StreamedSplit:
    """The rows of a training split in the order of streams."""

    def __init__(
        self,
        source: RowSource,
        order: StreamOrder,
        blocks: Blocks,
        config: DataConfig | None = None,
    ):
        self.dtype, self.num_sequences, self.num_rows = (
            source.dtype,
            source.num_sequences,
            source.num_rows,
        )
        self.source = source
        self.order = order
        self._blocks = blocks
        self._config = config
        # the rows of those that the last step was at
        self._windows: dict[StreamWindow, np.ndarray] = {}
        self._held: dict[int, _Held] = {}

    def train_rows(
        self, step: int, places: np.ndarray, batch_size: int, rows_before: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the row [n] int64 and the epoch [n] int32 of each place, ascending, of the global batch at a step.

        A pure function of the order and the arguments. Begins to read the windows that the streams behind the places
        come to next.
        """
        parts = self.order.parts(step, places, batch_size, rows_before)
        rows = np.empty(len(places), np.int64)
        epochs = np.empty(len(places), np.int32)
        windows: dict[StreamWindow, np.ndarray] = {}
        for window, where, first in parts:
            # most steps are in the windows of the step before
            all_rows = windows[window] = (
                self._windows[window] if window in self._windows else self.order.rows(window)
            )
            rows[where], epochs[where] = (
                all_rows[first : first + where.stop - where.start],
                window.epoch,
            )
        self._windows = windows
        if isinstance(self.source, RemoteRows):
            self._hold({part.window.stream: part.window for part in parts}, self.source.cache)
        return rows, epochs

    def gather(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], in their order, as records of `dtype` in memory."""
        # which would read the blocks ahead that come next on the disk
        if isinstance(self.source, RemoteRows):
            return self.source.take(
                row_indices, np.searchsorted(self._blocks.ends, row_indices, side="right")
            )
        return self.source.gather(row_indices)

    def keep(self, rows: np.ndarray) -> None:
        """Leaves out all rows but these, ascending: `train_rows` numbers those that stay, and `gather` all.

        Windows then have so many fewer rows, of about as many blocks as before.
        """
        edges = np.searchsorted(rows, np.append(0, self._blocks.ends))
        window_rows = -(-self.order.window_rows * len(rows) // self.num_rows)
        self.order = dataclasses.replace(
            self.order, block_rows=np.diff(edges), window_rows=window_rows
        )

    def describe(self) -> str:
        """Returns a short description of the order and of the rows mixed at a time."""
        order = self.order
        size = self.dtype.itemsize
        mixed = order.window_rows * order.num_streams
        return (
            f"in {order.num_streams} streams of {len(order.block_rows):,} blocks, about "
            f"{min(mixed, self.num_rows):,} rows ({min(mixed, self.num_rows) * size / 1e6:,.0f} MB) mixed at a time"
        )

    def close(self) -> None:
        """Stops reading ahead."""
        self.source.close()

    def _hold(self, windows: dict[int, StreamWindow], cache: BlockCache) -> None:
        """Keeps the blocks of these windows, by stream, and of the next ones; lets others go.

        Raises: InputError if the cache is too small for them.
        """
        before, self._held = self._held, {}
        # let go last, since a window that begins has blocks of the one that ends
        left = [held for stream, held in before.items() if held.window != windows.get(stream)]
        for stream, window in windows.items():
            if stream in before and before[stream].window == window:
                self._held[stream] = before[stream]
                continue
            after = self.order.next(window)
            now = self.order.blocks(window)
            then = self.order.blocks(after)
            cache.want(now, self.order.first_turn(window))
            cache.want(then, self.order.first_turn(after))
            self._held[stream] = _Held(window, np.concatenate([now, then]))
        for held in left:
            cache.release(held.blocks)
        self._check_room(cache)

    def _check_room(self, cache: BlockCache) -> None:
        needed = sum(len(held.blocks) for held in self._held.values())
        slot = self._blocks.most_rows * self.dtype.itemsize
        # a quarter stays for what is being read; a cache with room for all blocks is never too small
        if needed > cache.num_slots * 3 // 4 and cache.num_slots <= len(self._blocks.rows):
            config = self._config or DataConfig()
            gigabytes = math.ceil(1.6 * needed * slot / 1e7) / 100
            small = f"data.cache_gb {config.cache_gb:g} is too small for the {len(self._held)} streams of this process"
            raise InputError(
                f"{small}; set it to {gigabytes:g}, or data.window_mb to less than {config.window_mb:g}"
            )
