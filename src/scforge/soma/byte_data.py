"""Byte batches: chunks of documents, tokenized on demand.

Shapes: B chunks, S tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import lightning
import numpy as np
import torch

from scforge._checks import check_count, check_seed, check_share
from scforge.errors import OptionError
from scforge.soma.documents import Document
from scforge.soma.v1.configs import V1_EOS_TOKEN_ID, V1_PAD_TOKEN_ID


class Chunks:
    """The chunks of documents, as returned by :func:`scforge.soma.v1.tokenizer.tokenize`.

    Only the bytes are stored in memory; tokens are created one batch at a time.

    Parameters
    ----------
    documents
        Byte documents; no document may be empty.
    seq_len
        Number of tokens S per chunk, at least 2.

    Examples
    --------
    >>> chunks = Chunks([Document("a", b"abcd"), Document("b", b"ef")], seq_len=3)
    >>> ids, targets = chunks.tokens(np.arange(len(chunks)))
    >>> ids.tolist()
    [[97, 98, 99], [100, 257, 256], [101, 102, 257]]
    >>> targets.tolist()
    [[98, 99, 256], [257, 256, 256], [102, 257, 256]]
    """

    def __init__(self, documents: Sequence[Document], seq_len: int) -> None:
        check_count("seq_len", seq_len, "tokens", least=2)
        self.seq_len = seq_len
        sizes = np.array([len(document.data) for document in documents], dtype=np.int64)
        per_document = -(-sizes // seq_len)
        ends = np.cumsum(sizes)
        self.documents = np.repeat(np.arange(len(sizes)), per_document)
        """Index of the document of each chunk."""
        first = np.cumsum(per_document) - per_document
        within = np.arange(per_document.sum()) - np.repeat(first, per_document)
        self._starts = np.repeat(ends - sizes, per_document) + within * seq_len
        self._ends = np.repeat(ends, per_document)
        self.sizes = np.minimum(self._ends - self._starts, seq_len)
        """Bytes of each chunk."""
        self._data = np.frombuffer(b"".join(document.data for document in documents), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def n_bytes(self) -> int:
        """Total number of bytes in all documents."""
        return len(self._data)

    def tokens(self, chunks: np.ndarray, *, shorten: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and targets of chunks, int64, each (B, S); `shorten` removes columns that are only padding."""
        sizes = self.sizes[chunks]
        length = min(self.seq_len, int(sizes.max()) + 1) if shorten else self.seq_len
        # Targets reach one token further; what lies behind a chunk is no target of it.
        places = np.arange(length + 1)
        at = np.minimum(self._starts[chunks][:, None] + places, len(self._data) - 1)
        tokens = self._data[at].astype(np.int64)
        tokens[places >= sizes[:, None]] = V1_PAD_TOKEN_ID
        ends = (self._starts[chunks] + sizes == self._ends[chunks]) & (sizes < self.seq_len)
        tokens[ends, sizes[ends]] = V1_EOS_TOKEN_ID
        return tokens[:, :-1], tokens[:, 1:]


def hold_out(documents: Sequence[Document], share: float, *, seed: int) -> tuple[list[Document], list[Document]]:
    """Split documents into training and held-out documents; the latter contain about a fraction `share` of the bytes.

    Whole documents are held out in random order, except documents that would exceed the fraction by more than they
    approach it. If the held-out documents contain less than half of the fraction, the end of the largest remaining
    document is also held out. Identical documents stay together, so that held-out documents are not memorized.

    Raises
    ------
    OptionError
        If `share` is not a number from 0 to below 1, or no training documents remain.

    Examples
    --------
    >>> train, held_out = hold_out([Document(f"{i}", bytes([i])) for i in range(10)], 0.2, seed=0)
    >>> len(train), len(held_out)
    (8, 2)
    """
    if check_share("validation_size", share) == 1:
        raise OptionError("leaves no training data; pass a number below 1.", validation_size=share)
    if share == 0:
        return list(documents), []
    sizes: Counter[bytes] = Counter()
    for document in documents:
        sizes[document.data] += len(document.data)
    contents, target = list(sizes), share * sizes.total()
    chosen: set[bytes] = set()
    n_bytes = 0
    for number in np.random.default_rng(check_seed(seed)).permutation(len(contents)):
        if n_bytes >= target or len(chosen) == len(contents) - 1:
            break
        after = n_bytes + sizes[contents[number]]
        if after - target < target - n_bytes:
            chosen.add(contents[number])
            n_bytes = after
    held_out = [document for document in documents if document.data in chosen]
    left = [document for document in documents if document.data not in chosen]
    if n_bytes >= target / 2:
        return left, held_out
    longest = max((document.data for document in left), key=lambda data: (sizes[data], data))
    cut = len(longest) - max(1, round(len(longest) * (target - n_bytes) / sizes[longest]))
    if cut < 1:
        raise OptionError("leaves no training bytes; pass more data, or validation_size=0.", validation_size=share)
    ends = [Document(document.name, longest[cut:]) for document in left if document.data == longest]
    left = [Document(document.name, longest[:cut]) if document.data == longest else document for document in left]
    return left, held_out + ends


class ByteBatches:
    """The batches of an epoch, which depend only on the seed and the epoch.

    Parameters
    ----------
    data
        The data module.
    chunks
        The chunks to sample batches from.
    shuffle
        Whether batches are sampled at random.
    start
        Number of batches in the epoch to skip, because they were already used.
    """

    def __init__(self, data: ByteData, chunks: Chunks, *, shuffle: bool, start: int = 0) -> None:
        self.data, self.chunks, self.shuffle, self.start = data, chunks, shuffle, start

    def __len__(self) -> int:
        return -(-len(self.chunks) // self.data.batch_size) - self.start

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        size, order = self.data.batch_size, np.arange(len(self.chunks))
        if self.shuffle:
            assert self.data.trainer is not None
            order = np.random.default_rng([self.data.seed, self.data.trainer.current_epoch]).permutation(order)
            self.data.done = self.start
        for number in range(self.start, self.start + len(self)):
            chosen = order[number * size : (number + 1) * size]
            ids, targets = self.chunks.tokens(chosen, shorten=True)
            if self.shuffle:
                self.data.done += 1
            yield {
                "input_ids": torch.from_numpy(ids),
                "targets": torch.from_numpy(targets),
                "n_bytes": torch.tensor(float(self.chunks.sizes[chosen].sum())),
            }


class ByteData(lightning.LightningDataModule):
    """Training and held-out bytes, for :func:`scforge.training.fitting.fit`.

    Parameters
    ----------
    train, held_out
        Training and held-out documents.
    seq_len
        Number of tokens S per chunk.
    batch_size
        Number of chunks B per batch.
    seed
        Random seed for the chunk order.
    """

    max_tokens_per_batch = None

    def __init__(
        self, train: Sequence[Document], held_out: Sequence[Document], *, seq_len: int, batch_size: int, seed: int
    ) -> None:
        super().__init__()
        check_count("batch_size", batch_size, "sequences")
        self.train_chunks, self.held_out_chunks = Chunks(train, seq_len), Chunks(held_out, seq_len)
        self.train_rows, self.validation_rows = np.arange(len(self.train_chunks)), np.arange(len(self.held_out_chunks))
        self.batch_size, self.seed = batch_size, check_seed(seed)
        self.done = 0
        self._start = 0

    def train_dataloader(self) -> ByteBatches:
        """Return the training batches, in a different order in each epoch."""
        start, self._start = self._start, 0
        return ByteBatches(self, self.train_chunks, shuffle=True, start=start)

    def val_dataloader(self) -> ByteBatches | list[Any]:
        """Return the held-out batches."""
        return ByteBatches(self, self.held_out_chunks, shuffle=False) if len(self.held_out_chunks) else []

    def position(self, *, begins_epoch: bool) -> dict[str, int]:
        """Return the number of completed batches in the epoch, or 0 if the next epoch is about to begin."""
        return {"done": 0 if begins_epoch else self.done}

    def go_on_with(self, position: dict[str, int]) -> None:
        """Make the next :meth:`train_dataloader` skip the completed batches."""
        self._start = int(position["done"])
