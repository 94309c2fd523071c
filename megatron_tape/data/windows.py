"""Windows that begin where their documents do, in an order that only the seed decides."""

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from torch import Tensor
from torch.utils.data import Dataset


def cut_documents(lengths: np.ndarray, documents: np.ndarray, seq_length: int) -> dict[str, np.ndarray]:
    """Return where the windows of `documents` (D,) lie, indices into the `lengths` of a dataset: arrays (D,), int64.

    `ends_of_whole` counts the whole windows up to and with each document, and `left` the tokens that fill none. Windows
    of a document begin at its start and lie side by side; the token after each, its last label, is in the document too.
    A single token that is left is only a label, and counts as none.
    """
    lengths = lengths[documents].astype(np.int64)
    whole = np.maximum(lengths - 1, 0) // seq_length
    left = lengths - whole * seq_length
    left[(whole > 0) & (left == 1)] = 0
    return {"documents": documents, "ends_of_whole": np.cumsum(whole), "left": left}


class DocumentWindows(Dataset):
    """Endless epochs over documents of a dataset, each in an order of its own.

    Megatron's `GPTDataset` cuts its stream of documents anywhere, so that a document of one and a half windows rarely
    fills one. Here a document gives as many whole windows as it can, from its start; what is left of all documents
    is shuffled, joined and cut into windows as `GPTDataset` does. An epoch has every token once, but for the last
    incomplete window. `cut` is what `cut_documents` returned, of documents with more than `seq_length` tokens in all.
    """

    def __init__(self, dataset: IndexedDataset, cut: dict[str, np.ndarray], seq_length: int, seed: int):
        self._dataset, self._seq_length, self._seed = dataset, seq_length, seed
        self._documents, self._ends_of_whole, self._left = cut["documents"], cut["ends_of_whole"], cut["left"]
        self.samples_per_epoch = int(self._ends_of_whole[-1]) + max(0, int(self._left.sum()) - 1) // seq_length
        self._epoch = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        epoch, index = divmod(int(index), self.samples_per_epoch)
        if epoch != self._epoch:
            self._begin(epoch)
        index = int(self._samples[index])
        whole = index < self._ends_of_whole[-1]
        text = self._whole_window(index) if whole else self._window_of_rests(index - int(self._ends_of_whole[-1]))
        text = torch.from_numpy(text.astype(np.int64))
        return {"tokens": text[:-1], "labels": text[1:]}

    def _begin(self, epoch: int) -> None:
        # numpy promises that this generator's numbers never change.
        random = np.random.RandomState([self._seed, epoch])
        self._samples = random.permutation(self.samples_per_epoch)
        self._order = random.permutation(np.flatnonzero(self._left))
        self._ends_of_rests = np.cumsum(self._left[self._order])
        self._epoch = epoch

    def _first_whole(self, place: int) -> int:
        """Return the number of a document's first whole window."""
        return int(self._ends_of_whole[place - 1]) if place else 0

    def _whole_window(self, index: int) -> np.ndarray:
        place = int(np.searchsorted(self._ends_of_whole, index, side="right"))
        window = index - self._first_whole(place)
        return self._dataset.get(
            int(self._documents[place]), offset=window * self._seq_length, length=self._seq_length + 1
        )

    def _window_of_rests(self, index: int) -> np.ndarray:
        start = index * self._seq_length
        missing, parts = self._seq_length + 1, []
        number = int(np.searchsorted(self._ends_of_rests, start, side="right"))
        while missing:
            place = int(self._order[number])
            left, begun = int(self._left[place]), int(self._ends_of_rests[number]) - int(self._left[place])
            skipped = max(0, start - begun)
            length = min(missing, left - skipped)
            offset = (int(self._ends_of_whole[place]) - self._first_whole(place)) * self._seq_length + skipped
            parts.append(self._dataset.get(int(self._documents[place]), offset=offset, length=length))
            missing -= length
            number += 1
        return np.concatenate(parts)
