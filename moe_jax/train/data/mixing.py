"""The order in which documents are learned: reshuffled in each epoch; sources with weights get their share of an epoch.

An epoch has one place per document. Without weights each document has one place. With weights each source gets its share of the
places, and cycles through its own documents, reshuffled in each cycle. So a small source with a large weight is learned several
times per epoch, and a large one with a small weight only in part.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from moe_jax.train.data.documents import Documents

if TYPE_CHECKING:
    import grain


def endless(documents: Documents, seed: int) -> "grain.MapDataset[dict[str, Any]]":
    """Returns an endless, randomly accessible sequence of documents in training order, determined by the seed.

    Records of a stream keep their order.

    Raises:
      ValueError: a source's weight is too small for a place in an epoch.
    """
    import grain

    if documents.is_stream:
        return grain.MapDataset.source(documents)
    if documents.parts[0].weight is None:
        return grain.MapDataset.source(documents).shuffle(seed=seed).repeat()
    orders, places = _orders(documents, seed), np.asarray(places_of_sources(documents))

    class Drawn(grain.MapDataset):
        """The documents by position over all epochs, before shuffling within each epoch."""

        def __len__(self) -> int:
            return len(documents)

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                return self.slice(index)
            return documents[_document(int(index), places, orders)]

    return Drawn().shuffle(seed=seed).repeat()


def epoch(documents: Documents, seed: int) -> Int[np.ndarray, "length"]:
    """Returns the documents of the first epoch, unordered; weighted sources may repeat documents.

    Raises:
      ValueError: as in `endless`.
    """
    if documents.parts[0].weight is None:
        return np.arange(len(documents))
    orders = _orders(documents, seed)
    counts = enumerate(places_of_sources(documents))
    return np.asarray([int(orders[number][i]) for number, places in counts for i in range(places)])


def places_of_sources(documents: Documents) -> list[int]:
    """Returns how many documents of each source are in an epoch: shares by weight, rounded to add up.

    Raises:
      ValueError: a source has no place.
    """
    weights = [part.documents if part.weight is None else part.weight for part in documents.parts]
    ends = np.round(np.cumsum(weights) / sum(weights) * len(documents)).astype(int)
    places = np.diff(ends, prepend=0).tolist()
    if 0 in places:
        part = documents.parts[places.index(0)]
        raise ValueError(
            f"{part.name} has weight {part.weight} of {sum(weights)}, which is no document in an epoch of {len(documents)}; "
            "give a larger weight, or leave the source out"
        )
    return places


def _orders(documents: Documents, seed: int) -> list["grain.MapDataset[int]"]:
    """Returns the endless order of each source's own documents."""
    import grain

    ends = np.cumsum([part.documents for part in documents.parts]).tolist()
    return [
        grain.MapDataset.range(end - part.documents, end).shuffle(seed=(seed + 1 + number) % 2**32).repeat()
        for number, (end, part) in enumerate(zip(ends, documents.parts, strict=True))
    ]


def _document(place: int, places: Int[np.ndarray, "copies"], orders: Sequence[Any]) -> int:
    """Maps a place in all epochs to a document; places of one source are consecutive."""
    number_of_epoch, inside = divmod(place, int(places.sum()))
    ends = places.cumsum()
    number = int(np.searchsorted(ends, inside, side="right"))
    of_source = int(places[number])
    return int(orders[number][number_of_epoch * of_source + inside - (int(ends[number]) - of_source)])
