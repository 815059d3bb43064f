"""docs/coming-from-more.md: our blocks run here, those of the others where they are installed, and both agree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from page_blocks import blocks_of  # noqa: E402

PAGE = ROOT / "docs" / "coming-from-more.md"
MODULES = {
    "loss-landscapes": "loss_landscapes",
    "laplace-torch": "laplace",
    "cleanlab": "cleanlab",
    "WeightWatcher": "weightwatcher",
}
ANSWERS = {"loss-landscapes": "between", "laplace-torch": "precision", "cleanlab": "scores", "WeightWatcher": "norms"}


def run(label: str) -> dict[str, Any]:
    """The names that the common block and those of one library leave behind."""
    names: dict[str, Any] = {}
    for block in blocks_of(PAGE.read_text(encoding="utf-8")):
        if block.code.startswith(("# all\n", f"# {label}\n")):
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    return names


def test_every_block_has_a_known_label() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    assert text.count("```") == 2 * len(blocks)
    labels = {block.code.partition("\n")[0].removeprefix("# ") for block in blocks}
    assert labels == {"all", "spiritlevel", *MODULES}


@torch.no_grad()
def check_ours(ours: dict[str, Any]) -> None:

    model, other, data = ours["model"], ours["other"], (ours["inputs"], ours["targets"])
    fresh = run("nobody")  # the other model before the recorder trained it
    for k, loss in enumerate(ours["between"].tolist(), 1):
        mixed = {
            name: here + k / 11 * (there - here)
            for (name, here), there in zip(model.named_parameters(), fresh["other"].parameters(), strict=True)
        }
        outputs = torch.func.functional_call(model, mixed, data[0])
        assert loss == pytest.approx(float(nn.functional.cross_entropy(outputs, data[1])), rel=1e-5)
    assert ours["plane"][5, 5] == pytest.approx(float(nn.functional.cross_entropy(model(data[0]), data[1])), rel=1e-5)
    assert ours["plane"].shape == (11, 11)
    probabilities = model(data[0]).softmax(1).double()
    own = probabilities.gather(1, data[1][:, None])[:, 0]
    rest = probabilities.scatter(1, data[1][:, None], -1.0).amax(1)
    assert torch.allclose(ours["scores"], (own - rest + 1) / 2, atol=1e-6)
    assert torch.allclose(ours["again"], ours["norms"] * torch.tensor([10.0, 0.1]), rtol=1e-4)
    assert len(ours["suspicious"]) == 5
    assert ours["precision"].shape == (387, 387)
    assert other is not model


def test_our_blocks_run_and_are_right() -> None:
    check_ours(run("spiritlevel"))


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", MODULES)
def test_the_others_agree(label: str) -> None:
    pytest.importorskip(MODULES[label])
    found = [torch.as_tensor(run(each)[ANSWERS[label]]).detach() for each in (label, "spiritlevel")]
    theirs, ours = (each.double().numpy() for each in found)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
