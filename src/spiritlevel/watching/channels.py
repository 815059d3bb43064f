"""Follows channels through a recorded forward pass: which entries of which parameters belong to one unit.

Every layer that writes values gives each of its channels a number, an *atom*. Atoms are carried along by every
operation through which a map of the channels passes (`Passing` says which map: a scaling, a permutation, an invertible
matrix …), and tied where two values are added. A layer that reads atoms undoes the map. Everything tied together is
one *unit*; units that appear in the same places are exchangeable and make up a `Block`. A block lists the entries of
the parameters that take the map on one side and its inverse transpose on the other, so that every transform of
channels is one and the same operation: rows of entries, multiplied by a matrix.

Whatever is not known here stops the atoms that it reads; a transform may miss a symmetry but must never invent one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spiritlevel.watching.graph import Graph, Operation, Value

NONE = -1
"""The atom of an entry that belongs to no channel."""


@dataclass(frozen=True)
class Passing:
    """What a map of the channels can pass through without changing the network's function.

    Moving entries about, linear operations that treat all channels alike, and layers pass every map. The rest is
    declared here: elementwise `functions` ("none", "homogeneous" of degree one for positive factors, "any"); `each`,
    factors that differ between channels; `offsets`, summands that are the same for all channels; `products` of two
    values, channel by channel; `gains` of norms ("stop" the map, are "tied" to the channels, or "write" channels of
    their own); `symmetric` functions of all channels, such as means; `attention`, products of two values; `squares`,
    lengths over the channels. An `orthogonal` map is its own inverse transpose, so it may act on both sides of a
    shared weight.
    """

    functions: str = "none"
    each: bool = False
    offsets: bool = False
    products: bool = False
    gains: str = "stop"
    symmetric: bool = False
    attention: bool = False
    squares: bool = False
    orthogonal: bool = False
    factors: bool = True  # multiplication by numbers; without it, only what leaves the values unchanged
    outputs: bool = False  # whether the network's outputs may be mapped


@dataclass(frozen=True)
class Use:
    """Entries of the state, one row for each atom, that take the map (side 1) or its inverse transpose (side -1)."""

    operation: Operation
    side: int
    entries: Tensor  # (atoms, entries of one atom), indices into the state laid end to end
    atoms: Tensor
    role: str = "weight"  # or "bias", what is added to each channel


@dataclass(frozen=True)
class Slot:
    """Entries (units, k) of the state in a block: the row of a unit takes the map, or its inverse transpose."""

    operation: Operation
    side: int
    entries: Tensor
    role: str = "weight"


@dataclass(frozen=True)
class Product:
    """A product of two values with channels, the scores of attention: (…, i, k) times (…, k, j).

    `first` and `second` (…, k) are the atoms that meet, `axes` those of i and j in the result, both `None` if the
    softmax over j follows inside the operation.
    """

    operation: Operation
    first: Tensor
    second: Tensor
    axes: tuple[int, int] | None


@dataclass(frozen=True)
class Mixture:
    """A product of shares, which have no channels, with values that do: atoms (…, j).

    `shares` are summed with the values over `axis`; `None` if they are made inside the operation, by a softmax.
    """

    operation: Operation
    atoms: Tensor
    shares: Value | None
    axis: int


@dataclass(frozen=True)
class Block:
    """Exchangeable units and the slots where they appear; `tags` say what they went through."""

    units: int
    slots: tuple[Slot, ...]
    tags: frozenset[str]
    atoms: Tensor  # (units,) the first atom of each
    turned: bool = False  # whether constants multiply its channels one by one: the block is then one unit
    pairs: tuple[Slot, ...] = ()  # of such a unit: entries (2, k) that are added to each other, as rotations do


class Layout:
    """All parameters and buffers laid end to end."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self.starts: dict[str, int] = {}
        self.size = 0
        for name, shape in self.shapes.items():
            self.starts[name] = self.size
            self.size += shape.numel()

    def entries(self, name: str) -> Tensor:
        """The indices of a tensor's entries, in its own shape."""
        start, shape = self.starts[name], self.shapes[name]
        return torch.arange(start, start + shape.numel()).reshape(shape)

    def owners(self, entries: Tensor) -> list[str]:
        """The tensors that these entries belong to."""
        names = list(self.starts)
        bounds = torch.tensor(list(self.starts.values()))
        found = torch.searchsorted(bounds, entries.reshape(-1).unique(), right=True) - 1
        return [names[index] for index in found.unique().tolist() if self.shapes[names[index]].numel()]


@dataclass
class Forest:
    """Atoms that are tied to each other, directly or with the inverse transpose (`flip`) in between."""

    parents: list[int] = field(default_factory=list)
    flips: list[bool] = field(default_factory=list)
    stopped: list[tuple[int, str]] = field(default_factory=list)
    conflicts: list[int] = field(default_factory=list)

    def new(self, count: int) -> Tensor:
        start = len(self.parents)
        self.parents += range(start, start + count)
        self.flips += [False] * count
        return torch.arange(start, start + count)

    def root(self, atom: int) -> tuple[int, bool]:
        path, flip = [], False
        while self.parents[atom] != atom:
            path.append(atom)
            atom = self.parents[atom]
        for step in reversed(path):  # every atom on the way points to the root from now on
            flip ^= self.flips[step]
            self.parents[step], self.flips[step] = atom, flip
        return atom, flip

    def tie(self, first: Tensor, second: Tensor, flip: bool = False) -> None:
        pairs = distinct(first, second)
        for a, b in pairs[(pairs >= 0).all(1)].tolist():
            (one, turned), (two, other) = self.root(a), self.root(b)
            if one != two:
                self.parents[two], self.flips[two] = one, turned ^ other ^ flip
            elif turned ^ other ^ flip:
                self.conflicts.append(a)

    def stop(self, atoms: Tensor | None, reason: str) -> None:
        if atoms is not None:
            self.stopped += [(atom, reason) for atom in atoms[atoms >= 0].unique().tolist()]


class Channels:
    """The channels of a recorded network under one kind of map; `following.follow_channels` fills it."""

    def __init__(self, graph: Graph, passing: Passing) -> None:
        self.graph, self.passing = graph, passing
        self.layout = Layout({name: tensor.shape for name, tensor in graph.state.items()})
        self.forest = Forest()
        self.atoms: dict[Value, Tensor] = {}
        self.entries: dict[Value, Tensor] = {}  # values that are nothing but entries of the state, moved about
        self.squared: set[Value] = set()
        self.varying: set[Value] = set()  # values that depend on the network's input
        self.uses: list[Use] = []
        self.loose: list[tuple[Tensor, str]] = []  # entries that are read in a way we do not follow
        self.marks: list[dict[int, int]] = []  # of atoms: what keeps them apart from others
        self.tags: list[tuple[Tensor, str]] = []
        self.twisted: set[int] = set()  # atoms that are multiplied by constants of their own, as rotary embeddings do
        self.partners: dict[int, set[int]] = {}  # of those, the higher ones that each is added to
        self.products: list[Product] = []
        self.mixtures: list[Mixture] = []

    # ---- what rules do

    def view(self, value: Value) -> Tensor | None:
        """The entries of the state that a value consists of, `None` if it is anything else."""
        if value.name and value not in self.entries:
            self.entries[value] = self.layout.entries(value.name)
        return self.entries.get(value)

    def use(self, operation: Operation, side: int, entries: Tensor, atoms: Tensor, role: str = "weight") -> None:
        known = atoms >= 0
        self.uses.append(Use(operation, side, entries[known], atoms[known], role))

    def mark(self, atoms: Tensor, labels: Tensor, tag: str = "") -> None:
        """Keep atoms with different labels apart; an atom's label is the smallest that it meets."""
        known = atoms >= 0
        where, which = atoms[known].unique(return_inverse=True)
        least = torch.full(where.shape, torch.iinfo(torch.int64).max)
        least = least.scatter_reduce(0, which, labels.expand(atoms.shape)[known], "amin")
        self.marks.append(dict(zip(where.tolist(), least.tolist(), strict=True)))
        if tag:
            self.tag(where, tag)

    def twist(self, first: Tensor, second: Tensor) -> None:
        """Note which turned atoms are added to each other."""
        for pair in distinct(first, second).tolist():
            one, two = sorted(pair)
            if one != two and one in self.twisted and two in self.twisted:
                self.partners.setdefault(one, set()).add(two)

    def tag(self, atoms: Tensor, tag: str) -> None:
        self.tags.append((atoms[atoms >= 0].unique(), tag))

    def stop(self, operation: Operation, reason: str = "") -> None:
        """Let nothing pass: the atoms that an operation reads are stopped, the parameters that it reads are loose."""
        reason = reason or f"the operation {operation.described}"
        for value in operation.inputs:
            if value in self.atoms:
                self.forest.stop(self.atoms[value], reason)
            elif (entries := self.view(value)) is not None:
                self.loose.append((entries.reshape(-1), reason))

    def adopt(self, operation: Operation, entries: Tensor, atoms: Tensor) -> None:
        """Entries of the state that meet atoms one by one, such as an added bias, become part of them.

        All entries of the tensor with the same index on the channels' axis go along, even those that these two samples
        do not read, such as the embeddings of later positions.
        """
        known = atoms >= 0
        entries, atoms = entries[known], atoms[known]
        for name in self.layout.owners(entries):
            shape, own = self.layout.shapes[name], self.layout.entries(name)
            inside = (entries >= self.layout.starts[name]) & (entries < self.layout.starts[name] + shape.numel())
            found = self._axis(entries[inside] - self.layout.starts[name], atoms[inside], shape)
            if found is None:
                reason = f"the tensor {name!r} at {operation.place}, which several channels share"
                self.forest.stop(atoms[inside], reason)
                self.loose.append((entries[inside], reason))
                continue
            axis, index, tied = found
            self.use(operation, 1, own.movedim(axis, 0)[index].reshape(len(index), -1), tied, "bias")

    @staticmethod
    def _axis(local: Tensor, atoms: Tensor, shape: torch.Size) -> tuple[int, Tensor, Tensor] | None:
        """The axis of a tensor on which every index meets one atom, these indices, and their atoms."""
        best = None
        for axis in range(len(shape)):
            index = local // shape[axis + 1 :].numel() % shape[axis]
            pairs = distinct(index, atoms)
            if len(pairs) == len(pairs[:, 0].unique()) and (best is None or len(pairs) > len(best[1])):
                best = axis, pairs[:, 0], pairs[:, 1]
        return best

    # ---- what was found

    def share(self) -> None:
        """Tie the units of weights that are used more than once, or stop them where the uses do not correspond."""
        readers: dict[Operation, list[Use]] = {}
        for use in self.uses:
            readers.setdefault(use.operation, []).append(use)
        count = torch.zeros(self.layout.size, dtype=torch.int32)
        for uses in readers.values():
            entries = torch.cat([use.entries.reshape(-1) for use in uses]).unique()
            count[entries] += 1
        for entries, _ in self.loose:
            count[entries.unique()] += 1
        shared = [use for use in self.uses if bool((count[use.entries] > 1).any())]
        for number, use in enumerate(shared):
            reads = int(count[use.entries].max())
            same = [
                other
                for other in shared
                if other.entries.shape == use.entries.shape and bool((other.entries == use.entries).all())
            ]
            if len({id(other.operation) for other in same}) < reads:
                names = ", ".join(repr(name) for name in self.layout.owners(use.entries))
                self.forest.stop(use.atoms, f"the parameter {names}, which is read more than once (tied weights)")
            for other in same:
                if other.operation is not use.operation and any(other is earlier for earlier in shared[:number]):
                    self.forest.tie(other.atoms, use.atoms, flip=other.side != use.side)

    def reasons(self) -> dict[int, str]:
        """Why each root that takes no map takes none."""
        found: dict[int, str] = {}
        for atom, reason in self.forest.stopped:
            found.setdefault(self.forest.root(atom)[0], reason)
        if not self.passing.orthogonal:
            for atom in self.forest.conflicts:
                found.setdefault(self.forest.root(atom)[0], "one layer that stands on both sides of a product")
        return found

    def obstacles(self, tag: str = "") -> str:
        """The first few reasons in words, for the atoms with a tag if one is given; "" if there are none."""
        wanted = {self.forest.root(atom)[0] for atoms, name in self.tags if name == tag for atom in atoms.tolist()}
        reasons = [reason for root, reason in self.reasons().items() if not tag or root in wanted]
        return "; ".join(list(dict.fromkeys(reasons))[:3])

    def blocks(self) -> list[Block]:
        """The exchangeable units that take a map, with the places where they appear."""
        stopped = self.reasons()
        rows: dict[int, dict[tuple[int, int], list[int]]] = {}
        for number, use in enumerate(self.uses):
            for row, atom in enumerate(use.atoms.tolist()):
                root, flip = self.forest.root(atom)
                if root not in stopped:
                    side = -use.side if flip else use.side
                    rows.setdefault(root, {}).setdefault((number, side), []).append(row)
        apart: dict[int, set[tuple[int, int]]] = {root: set() for root in rows}
        for number, mark in enumerate(self.marks):
            for atom, label in mark.items():
                root = self.forest.root(atom)[0]
                if root in apart:
                    apart[root].add((number, label))
        tags: dict[int, set[str]] = {root: set() for root in rows}
        for atoms, tag in self.tags:
            for atom in atoms.tolist():
                tags.get(self.forest.root(atom)[0], set()).add(tag)
        turned = {self.forest.root(atom)[0] for atom in self.twisted}
        alike: dict[Any, list[int]] = {}
        for root, where in rows.items():
            places = tuple((key, len(found)) for key, found in where.items())
            own = root if root in turned else NONE
            alike.setdefault((places, frozenset(apart[root]), frozenset(tags[root]), own), []).append(root)
        return [self._block(roots, rows, tags[roots[0]], turned) for roots in alike.values()]

    def _block(self, roots: list[int], rows: dict[int, Any], tags: set[str], turned: set[int]) -> Block:
        slots: list[Slot] = []
        for (number, side), found in rows[roots[0]].items():
            use = self.uses[number]
            for rank in range(len(found)):
                entries = use.entries[[rows[root][number, side][rank] for root in roots]]
                if not any(_equal(entries, slot.entries) for slot in slots):  # a shared weight moves once
                    slots.append(Slot(use.operation, side, entries, use.role))
        pairs: list[Slot] = []
        if roots[0] in turned:
            for (number, side), found in rows[roots[0]].items():
                use = self.uses[number]
                where = {int(use.atoms[row]): row for row in found}
                for first, row in where.items():
                    for second in sorted(self.partners.get(first, ())):
                        if second in where:
                            pairs.append(Slot(use.operation, side, use.entries[[row, where[second]]], use.role))
        return Block(len(roots), tuple(slots), frozenset(tags), torch.tensor(roots), roots[0] in turned, tuple(pairs))


def distinct(first: Tensor, second: Tensor) -> Tensor:
    """The different pairs of entries of two tensors of small whole numbers, as rows."""
    scale = int(second.max()) + 2 if second.numel() else 1
    codes = ((first.reshape(-1) + 1) * scale + (second.reshape(-1) + 1)).unique()
    return torch.stack([codes // scale - 1, codes % scale - 1], 1)


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool((first == second).all())


def moved(operation: Operation, labels: dict[Value, Tensor]) -> list[Tensor] | None:
    """What an operation that only moves entries does to their labels; `None` if it cannot be repeated with them."""
    laid_out = {  # a view needs the strides of the tensor itself
        value: torch.empty_like(value.tensor, dtype=torch.int64, device="cpu").copy_(tensor.expand(value.shape))
        for value, tensor in labels.items()
    }
    try:
        result = operation.again(laid_out)
    except (RuntimeError, TypeError, ValueError):
        return None
    if operation.name == "__setitem__":
        result = laid_out[operation.args[0]]
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    fits = len(tensors) == len(operation.outputs)
    fits = fits and all(a.shape == b.shape for a, b in zip(tensors, operation.outputs, strict=True))
    return tensors if fits else None


def vector(atoms: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """One atom for each index on an axis, and whether all entries with that index agree on it."""
    flat = atoms.movedim(axis, 0).flatten(1) if atoms.ndim > 1 else atoms[:, None]
    if not flat.shape[1]:
        return torch.full((len(flat),), NONE), torch.ones(len(flat), dtype=torch.bool)
    return flat[:, 0], (flat == flat[:, :1]).all(1)


def constant(atoms: Tensor, axes: Iterable[int]) -> bool:
    """Whether atoms do not differ along axes."""
    axes = [axis % max(atoms.ndim, 1) for axis in axes]
    axes = [axis for axis in axes if atoms.shape[axis] > 1]
    return not axes or torch.equal(atoms.amin(axes), atoms.amax(axes))
