from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from spiritlevel.errors import InputError
from spiritlevel.papers import networks as models

COUNTS = [
    ("lenet5", {}, 61_706),
    ("lenet5", {"activation": "tanh"}, 61_706),
    ("lenet5", {"size": 32}, 61_706),
    ("lenet5", {"channels": 3}, 62_006),
    ("fcn_bn", {}, 935_434),
    ("fcn_bn", {"inputs": 1024}, 1_058_314),
    ("fcn_bn", {"inputs": 3072}, 2_106_890),
    ("softmax_regression", {}, 7_850),
    ("mlp", {}, 79_510),
    ("printed_mlp", {}, 9_960),
    ("deep_linear", {}, 3),
    ("all_cnn_c", {}, 1_387_108),
    ("preresnet164", {}, 1_726_388),
    ("preresnet164", {"classes": 10}, 1_703_258),
    ("wide_resnet_28_10", {}, 36_546_980),
    ("vgg16_bn", {}, 15_299_748),
    ("vgg16_bn", {"classes": 10}, 15_253_578),
]
SHAPES = {"lenet5": (1, 28, 28), "deep_linear": (1,)} | dict.fromkeys(
    ("strided_cnn", "fcn_bn", "softmax_regression", "mlp", "printed_mlp"), (1, 28, 28)
)


def batch(name: str, size: int = 2) -> Tensor:
    return torch.rand(size, *SHAPES.get(name, (3, 32, 32)), generator=torch.Generator().manual_seed(0))


def narrow(name: str) -> nn.Module:
    return models.build(name, width=0.1, classes=7).eval()


@pytest.mark.parametrize(("name", "options", "expected"), COUNTS)
def test_parameter_counts_are_the_papers(name: str, options: dict[str, object], expected: int) -> None:
    with torch.device("meta"):
        assert models.count(models.build(name, **options)) == expected


@pytest.mark.parametrize("name", models.NAMES)
def test_every_network_narrows_and_runs(name: str) -> None:
    model = narrow(name)
    assert {"width", "classes"} <= set(inspect.signature(getattr(models, name)).parameters)
    logits = model(batch(name))
    assert logits.shape == (2, 7)
    assert torch.isfinite(logits).all()
    with torch.device("meta"):
        wide = models.count(models.build(name, classes=7))
    assert models.count(model) < wide or name in ("softmax_regression", "deep_linear")


@pytest.mark.parametrize("name", models.NAMES)
def test_every_network_can_be_traced(name: str) -> None:
    model, inputs = narrow(name), batch(name)
    expected = model(inputs)
    assert torch.equal(fx.symbolic_trace(model)(inputs), expected)
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    graph = make_fx(lambda state, x: torch.func.functional_call(model, state, (x,)))(parameters, inputs)
    torch.testing.assert_close(graph(parameters, inputs), expected)
    assert not any(getattr(module, "inplace", False) for module in model.modules())


@pytest.mark.parametrize("name", ["all_cnn_c", "preresnet164", "wide_resnet_28_10", "vgg16_bn"])
def test_deep_networks_start_with_a_signal_that_reaches_the_outputs(name: str) -> None:
    torch.manual_seed(0)
    logits = models.build(name, width=0.1, classes=10).train()(batch(name, 8))
    assert logits.std(0).mean() > 1e-3  # the logits still tell the samples apart


def test_lenet_takes_both_image_sizes() -> None:
    assert models.lenet5(size=32)(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    assert models.lenet5(channels=3)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert models.lenet5(channels=3, size=28)(torch.zeros(2, 3, 28, 28)).shape == (2, 10)


def test_deep_linear_is_the_product_of_its_weights() -> None:
    model = models.deep_linear(inputs=4, classes=3, depth=4, hidden=5)
    product = torch.linalg.multi_dot(list(model.parameters())[::-1])
    inputs = torch.rand(6, 1, 2, 2)
    torch.testing.assert_close(model(inputs), inputs.flatten(1) @ product.T)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("lenet", {}, "unknown network 'lenet': did you mean 'lenet5'"),
        ("vgg16", {}, "did you mean 'vgg16_bn'"),
        ("mlp", {"widht": 2}, "unknown option of mlp 'widht': did you mean 'width'"),
        ("mlp", {"width": 0}, "positive width of at most .*, got 0"),
        ("mlp", {"width": float("nan")}, "width must be a finite number, got nan"),
        ("vgg16_bn", {"classes": 0}, "positive classes of at most .*, got 0"),
        ("deep_linear", {"depth": 0}, "positive depth of at most .*, got 0"),
        ("lenet5", {"activation": "rleu"}, "unknown activation 'rleu': did you mean 'relu'"),
        ("lenet5", {"size": 30}, "size 28 or 32, got 30"),
    ],
)
def test_bad_requests_get_one_sentence(name: str, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        models.build(name, **options)
