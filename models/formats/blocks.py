"""What the formats of heads made of residual blocks (Medusa, Hydra) share."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from drafthead.data.errors import UserError
from drafthead.models.formats.artefact import Artefact


def rows_of(artefact: Artefact, name: str, heads: str) -> int:
    """Rows of a tensor; ``heads`` says whose it is.

    Raises:
        UserError: there is no such tensor.
    """
    if name not in artefact.tensors:
        raise UserError(f"{artefact.source} has no tensor {name}; these are no {heads} heads")
    return len(artefact.tensors[name])


def tied(tensors: Mapping[str, Tensor], heads: Iterable[Sequence[str]]) -> bool:
    """True when heads have several blocks that may be one (``heads``: the names of each one's), and they are."""
    return all(len(names) > 1 and all(_equal(tensors, names[0], other) for other in names[1:]) for names in heads)


def _equal(tensors: Mapping[str, Tensor], one: str, other: str) -> bool:
    """Whether two linear layers have the same values; a bias may be missing."""
    pairs = [(tensors.get(f"{one}.{part}"), tensors.get(f"{other}.{part}")) for part in ("weight", "bias")]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
