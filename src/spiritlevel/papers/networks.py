"""The networks of the three papers, with the details that give each one its published parameter count.

Every network is a function that takes `classes` and `width`, a factor on all hidden channels (1.0 gives the papers'
network, 0.25 a quarter of the channels), and returns an `nn.Module` that maps a batch of images (N, C, H, W) to logits
(N, classes). Dense networks flatten their input themselves. Weights are drawn from torch's global random state, as
usual in PyTorch.

>>> count(lenet5()), count(lenet5(channels=3)), count(mlp()), count(printed_mlp())
(61706, 62006, 79510, 9960)
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from spiritlevel.arguments import checked
from spiritlevel.errors import InputError, unknown_name

_LARGEST = 10**7  # of any one size: a single layer beyond it would fill any machine
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def count(model: nn.Module) -> int:
    """The number of trainable parameters.

    >>> count(softmax_regression())
    7850
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _positive(**sizes: float) -> None:
    for name, size in sizes.items():
        if not 0 < size <= _LARGEST:
            raise InputError(f"a network needs a positive {name} of at most {_LARGEST:,}, got {size}.")


def _scale(channels: int, width: float) -> int:
    return max(1, round(channels * width))


def _he_normal(model: nn.Module) -> nn.Module:
    """He's initialisation for deep ReLU networks: without batch norm, PyTorch's default would let the signal fade."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _dense(inputs: int, hidden: tuple[int, ...], classes: int, width: float, *, batch_norm: bool = False) -> nn.Module:
    _positive(inputs=inputs, classes=classes, width=width)
    layers: list[nn.Module] = [nn.Flatten()]
    for units in (_scale(channels, width) for channels in hidden):
        layers += [nn.Linear(inputs, units), *([nn.BatchNorm1d(units)] if batch_norm else []), nn.ReLU()]
        inputs = units
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


@checked
def softmax_regression(inputs: int = 784, classes: int = 10, width: float = 1.0) -> nn.Module:
    """One linear layer with bias: 7,850 parameters on MNIST (paper C). It has no hidden layer for `width` to change.

    >>> softmax_regression()
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=784, out_features=10, bias=True)
    )
    """
    return _dense(inputs, (), classes, width)


@checked
def mlp(inputs: int = 784, classes: int = 10, width: float = 1.0, depth: int = 1) -> nn.Module:
    """One hidden layer of 100 ReLU units, 784-100-10: 79,510 parameters. The net that paper C describes.

    `depth` hidden layers instead of one give the dense networks of the league of measures.

    >>> count(mlp(width=0.5)), count(mlp(depth=3))
    (39760, 99710)
    """
    _positive(depth=depth)
    return _dense(inputs, (100,) * depth, classes, width)


@checked
def printed_mlp(inputs: int = 784, classes: int = 10, width: float = 1.0) -> nn.Module:
    """The dense net 784-10-100-10, whose 9,960 parameters are those that paper C prints for its MLP.

    >>> count(printed_mlp())
    9960
    """
    return _dense(inputs, (10, 100), classes, width)


@checked
def fcn_bn(inputs: int = 784, classes: int = 10, width: float = 1.0) -> nn.Module:
    """Three hidden layers of 512 units, each Linear → BatchNorm → ReLU (FCNBN of paper A).

    935,434 parameters for 784 inputs (MNIST), 1,058,314 for 1024 (grey CIFAR), 2,106,890 for 3072 (colour CIFAR).

    >>> count(fcn_bn()), count(fcn_bn(inputs=3072))
    (935434, 2106890)
    """
    return _dense(inputs, (512, 512, 512), classes, width, batch_norm=True)


@checked
def deep_linear(inputs: int = 1, classes: int = 1, depth: int = 3, hidden: int = 1, width: float = 1.0) -> nn.Module:
    """A product of `depth` weight matrices, no biases and no activations: φ = W_depth ⋯ W₂ W₁ x.

    The default is the model w₁w₂w₃x of paper C's thought experiment.

    >>> count(deep_linear()), count(deep_linear(inputs=784, classes=10, hidden=20))
    (3, 16280)
    """
    _positive(inputs=inputs, classes=classes, depth=depth, hidden=hidden, width=width)
    sizes = [inputs, *[_scale(hidden, width)] * (depth - 1), classes]
    layers = [nn.Linear(fan_in, fan_out, bias=False) for fan_in, fan_out in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), *layers)


@checked
def lenet5(
    channels: int = 1, activation: str = "relu", classes: int = 10, width: float = 1.0, size: int | None = None
) -> nn.Module:
    """LeNet-5 with max-pooling and softmax outputs: 61,706 parameters for 1 channel, 62,006 for 3.

    Args:
        channels: Channels of the input.
        activation: "relu" or "tanh".
        classes: Number of outputs.
        width: Factor on the channels 6 and 16 and the units 120 and 84.
        size: Height and width of the input, 28 (padded by 2) or 32. Default: 28 for one channel, else 32.

    >>> count(lenet5()), count(lenet5(channels=3))
    (61706, 62006)
    """
    _positive(channels=channels, classes=classes, width=width)
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    size = (28 if channels == 1 else 32) if size is None else size
    if size not in (28, 32):
        raise InputError(f"lenet5 takes images of size 28 or 32, got {size}.")
    act = ACTIVATIONS[activation]
    c1, c2, f1, f2 = (_scale(units, width) for units in (6, 16, 120, 84))
    return nn.Sequential(
        nn.Conv2d(channels, c1, 5, padding=2 if size == 28 else 0),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(c1, c2, 5),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(c2 * 25, f1),
        act(),
        nn.Linear(f1, f2),
        act(),
        nn.Linear(f2, classes),
    )


def _average_head(channels: int, classes: int) -> list[nn.Module]:
    """Global average over the positions, then a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


@checked
def strided_cnn(channels: int = 1, classes: int = 10, width: float = 1.0, depth: int = 2) -> nn.Module:
    """`depth` 3×3 convolutions of 16 channels with ReLU, the first two of stride 2; averages to 4×4; a dense layer.

    The convolutional networks of the league of measures.

    >>> count(strided_cnn()), count(strided_cnn(channels=3, width=2.0, depth=4))
    (5050, 33770)
    """
    _positive(channels=channels, classes=classes, width=width, depth=depth)
    units, layers = _scale(16, width), list[nn.Module]()
    for number in range(depth):
        stride = 2 if number < 2 else 1
        layers += [nn.Conv2d(channels if number == 0 else units, units, 3, stride, padding=1), nn.ReLU()]
    return _he_normal(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * units, classes)))


@checked
def all_cnn_c(channels: int = 3, classes: int = 100, width: float = 1.0) -> nn.Module:
    """All-CNN-C: nine convolutions with biases, no batch norm, no dense layer (the 9-layer CNN of paper C).

    The logits are the global average of the last 1×1 convolution. 1,387,108 parameters for 100 classes.

    >>> count(all_cnn_c())
    1387108
    """
    _positive(channels=channels, classes=classes, width=width)
    a, b = _scale(96, width), _scale(192, width)
    plan = [(a, 3, 1), (a, 3, 1), (a, 3, 2), (b, 3, 1), (b, 3, 1), (b, 3, 2), (b, 3, 1), (b, 1, 1), (classes, 1, 1)]
    layers: list[nn.Module] = []
    for outputs, kernel, stride in plan:
        layers += [nn.Conv2d(channels, outputs, kernel, stride, padding=kernel // 2), nn.ReLU()]
        channels = outputs
    return _he_normal(nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten()))  # no ReLU on the logits


class Residual(nn.Module):
    """`body(x) + shortcut(x)`, the sum at the heart of every residual network.

    >>> Residual(nn.Identity(), nn.Identity())(Tensor([1.0, 2.0]))
    tensor([2., 4.])
    """

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the two branches."""
        return self.body(x) + self.shortcut(x)


def _norm_relu_conv(inputs: int, outputs: int, kernel: int, stride: int = 1, *, bias: bool = False) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=bias)
    return [nn.BatchNorm2d(inputs), nn.ReLU(), conv]


def _shortcut(inputs: int, outputs: int, stride: int, *, bias: bool) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Conv2d(inputs, outputs, 1, stride, bias=bias)


@checked
def preresnet164(channels: int = 3, classes: int = 100, width: float = 1.0) -> nn.Module:
    """Pre-activation ResNet of 164 layers: three stages of 18 bottlenecks with 16/32/64 inner channels.

    A block outputs four times its inner channels. No convolution has a bias and the shortcuts have no batch norm:
    1,726,388 parameters for 100 classes, 1,703,258 for 10.

    >>> import torch
    >>> with torch.device("meta"):
    ...     count(preresnet164())
    1726388
    """
    _positive(channels=channels, classes=classes, width=width)
    inputs = _scale(16, width)
    layers: list[nn.Module] = [nn.Conv2d(channels, inputs, 3, padding=1, bias=False)]
    for stage, planes in enumerate(_scale(units, width) for units in (16, 32, 64)):
        for block in range(18):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(
                *_norm_relu_conv(inputs, planes, 1),
                *_norm_relu_conv(planes, planes, 3, stride),
                *_norm_relu_conv(planes, 4 * planes, 1),
            )
            layers.append(Residual(body, _shortcut(inputs, 4 * planes, stride, bias=False)))
            inputs = 4 * planes
    return _he_normal(nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.ReLU(), *_average_head(inputs, classes)))


@checked
def wide_resnet_28_10(channels: int = 3, classes: int = 100, width: float = 1.0) -> nn.Module:
    """Wide ResNet 28×10: three stages of 4 blocks with 160/320/640 channels, every convolution with a bias.

    36,546,980 parameters for 100 classes; the usual bias-free version has 10,096 fewer.

    >>> import torch
    >>> with torch.device("meta"):
    ...     count(wide_resnet_28_10())
    36546980
    """
    _positive(channels=channels, classes=classes, width=width)
    inputs = _scale(16, width)
    layers: list[nn.Module] = [nn.Conv2d(channels, inputs, 3, padding=1)]
    for stage, planes in enumerate(_scale(units, width) for units in (160, 320, 640)):
        for block in range(4):
            stride = 2 if stage and not block else 1
            body = nn.Sequential(
                *_norm_relu_conv(inputs, planes, 3, bias=True),
                *_norm_relu_conv(planes, planes, 3, stride, bias=True),
            )
            layers.append(Residual(body, _shortcut(inputs, planes, stride, bias=True)))
            inputs = planes
    return _he_normal(nn.Sequential(*layers, nn.BatchNorm2d(inputs), nn.ReLU(), *_average_head(inputs, classes)))


@checked
def vgg16_bn(channels: int = 3, classes: int = 100, width: float = 1.0) -> nn.Module:
    """VGG-16 with batch norm for 32×32 images: convolutions with biases, classifier 512 → 512 → 512 → classes.

    The classifier is Dropout-Linear-ReLU twice, then the output layer. 15,299,748 parameters for 100 classes,
    15,253,578 for 10.

    >>> import torch
    >>> with torch.device("meta"):
    ...     count(vgg16_bn())
    15299748
    """
    _positive(channels=channels, classes=classes, width=width)
    layers: list[nn.Module] = []
    for units, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        outputs = _scale(units, width)
        for _ in range(convolutions):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            channels = outputs
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for _ in range(2):
        layers += [nn.Dropout(), nn.Linear(channels, channels), nn.ReLU()]
    return _he_normal(nn.Sequential(*layers, nn.Linear(channels, classes)))


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    builder.__name__: builder
    for builder in (
        lenet5,
        fcn_bn,
        softmax_regression,
        mlp,
        printed_mlp,
        deep_linear,
        strided_cnn,
        all_cnn_c,
        preresnet164,
        wide_resnet_28_10,
        vgg16_bn,
    )
}
NAMES: tuple[str, ...] = tuple(_BUILDERS)


@checked
def build(name: str, **options: Any) -> nn.Module:
    """The network `name` (one of `NAMES`) with its options; errors suggest the nearest name or option.

    >>> count(build("lenet5", channels=3))
    62006
    >>> build("lenet")
    Traceback (most recent call last):
    ...
    spiritlevel.errors.InputError: unknown network 'lenet': did you mean 'lenet5'? Known: all_cnn_c, ...
    """
    if name not in _BUILDERS:
        raise unknown_name("network", name, NAMES)
    known = inspect.signature(_BUILDERS[name]).parameters
    for option in options:
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
    return _BUILDERS[name](**options)
