"""Recurrent layers, their cells and packed sequences, written out step by step.

Each is one call that writes into its own memory, which nothing that follows single operations can look into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _recurrent(name: str) -> Callable[..., Any]:
    """A recurrent layer step by step, as PyTorch writes it out for its compiler."""

    def written_out(*args: Any, **kwargs: Any) -> Any:
        from torch._decomp import get_decompositions  # takes a while to import

        packed = not isinstance(args[3], bool)
        overload = getattr(getattr(torch.ops.aten, name), "data" if packed else "input")
        return get_decompositions([overload])[overload](*args, **kwargs)

    return written_out


def _lstm_cell(input: Tensor, hx: Sequence[Tensor], *weights: Any) -> tuple[Tensor, Tensor]:
    hidden, cell = hx
    from_input, from_state = _both_linear(input, hidden, *weights)
    let_in, forget, new, out = (from_input + from_state).chunk(4, -1)
    cell = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
    return out.sigmoid() * cell.tanh(), cell


def _gru_cell(input: Tensor, hidden: Tensor, *weights: Any) -> Tensor:
    (reset, update, new), (reset_again, update_again, again) = (
        gates.chunk(3, -1) for gates in _both_linear(input, hidden, *weights)
    )
    new = (new + again * (reset + reset_again).sigmoid()).tanh()
    return new + (hidden - new) * (update + update_again).sigmoid()


def _both_linear(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What a cell makes of its input and of its state."""
    return F.linear(input, w_ih, b_ih), F.linear(hidden, w_hh, b_hh)


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Sequences of falling lengths, step by step, each step with those sequences that reach it; and how many."""
    steps = input.transpose(0, 1) if batch_first else input
    sizes = (lengths > torch.arange(int(lengths.max()))[:, None]).sum(1)
    return torch.cat([step[: int(size)] for step, size in zip(steps, sizes, strict=False)]), sizes


def _unpack(
    data: Tensor, sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Packed sequences side by side again, with this value behind their ends, and their lengths."""
    counts = [int(size) for size in sizes]
    counts += [0] * (total_length - len(counts))
    ends = [0] * (2 * (data.ndim - 1))
    steps = [F.pad(step, [*ends, 0, counts[0] - len(step)], value=padding_value) for step in data.split(counts)]
    lengths = (torch.tensor(counts) > torch.arange(counts[0])[:, None]).sum(1)
    return torch.stack(steps, 1 if batch_first else 0), lengths


STEP_BY_STEP: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, name): _recurrent(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _unpack,
}
"""The operations, as `nn.LSTM` and its like call them, and what writes each of them out."""
