"""Batches of language models in the form of transformers, without that library: what is refused, and how it is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import spiritlevel as sl
from spiritlevel.errors import InputError


class TinyForCausalLM(nn.Module):
    """By its name a language model of transformers: its labels are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        return self.out(self.embed(input_ids))


class TinySeq2Seq(TinyForCausalLM):
    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return labels.roll(1, 1)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        if decoder_input_ids is None:
            raise ValueError("You must specify decoder_input_ids")
        return self.out(self.embed(decoder_input_ids))


IDS = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])


@pytest.mark.parametrize("function", [sl.sample_traces, sl.margins, sl.hessian, sl.measure, sl.audit])
def test_labels_that_are_the_inputs_need_the_loss_that_shifts(function: object) -> None:
    model, batch = TinyForCausalLM(), {"input_ids": IDS, "labels": IDS.clone()}
    batch["labels"][1, 3] = -100
    with pytest.raises(InputError, match=r"the labels of TinyForCausalLM are its own inputs, .*loss='causal_lm'"):
        function(model, [batch])  # type: ignore[operator]


def test_other_labels_and_other_losses_pass() -> None:
    model = TinyForCausalLM()
    assert len(sl.margins(model, [{"input_ids": IDS, "labels": IDS.roll(-1, 1)}])) == 2
    assert len(sl.margins(model, [{"input_ids": IDS, "labels": IDS}], loss="causal_lm")) == 2


def test_an_encoder_with_a_decoder_says_what_its_batches_lack() -> None:
    model = TinySeq2Seq()
    with pytest.raises(InputError, match=r"a batch needs decoder_input_ids, which DataCollatorForSeq2Seq"):
        sl.margins(model, [{"input_ids": IDS, "labels": IDS}])
    assert len(sl.margins(model, [{"input_ids": IDS, "labels": IDS, "decoder_input_ids": IDS.roll(1, 1)}])) == 2


class Forgetful(nn.Module):
    """As a model of transformers whose main argument was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 3)

    def forward(self, mask: Tensor, pixels: Tensor | None = None) -> Tensor:
        return self.out(pixels.float())  # type: ignore[union-attr]


@pytest.mark.parametrize("function", [sl.sample_traces, sl.margins, sl.hessian, sl.measure])
def test_whatever_a_model_raises_on_its_first_batch_is_one_sentence(function: object) -> None:
    batch = {"mask": torch.ones(4, 2), "labels": torch.arange(4) % 3}
    with pytest.raises(
        InputError, match=r"Forgetful fails on inputs of shape mask=\(\d, 2\): .*'NoneType' object has no attr"
    ):
        function(Forgetful(), [batch])  # type: ignore[operator]
