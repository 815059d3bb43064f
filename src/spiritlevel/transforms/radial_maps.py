"""Paper B's radial maps of parameter space."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spiritlevel.arguments import checked, number
from spiritlevel.binding.reading import Reading, form_of
from spiritlevel.binding.state import in_turn
from spiritlevel.errors import InputError
from spiritlevel.estimators import Operator
from spiritlevel.results import figure
from spiritlevel.transforms.certificates import Sample, Transformed
from spiritlevel.watching.factors import Factor


@dataclass(frozen=True, eq=False)
class RadialMap:
    """Paper B's radial transformation g of parameter space: it changes flatness at θ̂ and nothing outside a ball.

    g⁻¹(θ) = θ̂ + ψ(r, r̂, δ, ρ)/r · (θ − θ̂), r = ‖θ − θ̂‖, where ψ stretches [0, r̂] linearly to [0, ρ], [r̂, δ] to
    [ρ, δ], and is the identity beyond δ. g is the same map with r̂ and ρ exchanged. A loss L in the new parameters η is
    L(g(η)); at a critical point θ̂ its Hessian is (r̂/ρ)²∇²L. Calling the map gives g. Not differentiable on the spheres
    r = ρ and r = δ, where the inner piece is taken. Each operation costs O(P). Reference: paper B, section A;
    mathematics 7.7.

    >>> g = RadialMap(torch.zeros(2), delta=1.0, rho=0.1, r_hat=0.5)
    >>> g(torch.tensor([0.1, 0.0])), g.inverse(torch.tensor([0.5, 0.0])), g(torch.tensor([3.0, 4.0]))
    (tensor([0.5000, 0.0000]), tensor([0.1000, 0.0000]), tensor([3., 4.]))
    """

    center: Tensor
    delta: float
    rho: float
    r_hat: float

    def __post_init__(self) -> None:
        if self.center.ndim != 1:
            raise InputError(f"a radial map needs a flat center of shape (P,), got {tuple(self.center.shape)}.")
        if not (0 < self.delta < math.inf and 0 < self.rho < self.delta and 0 < self.r_hat < self.delta):
            raise InputError(
                "a radial map needs 0 < rho < delta and 0 < r_hat < delta, got "
                f"rho={self.rho}, r_hat={self.r_hat}, delta={self.delta}."
            )

    def __call__(self, eta: Tensor) -> Tensor:
        """g(η), differentiable."""
        center = self.center.to(eta)
        moved = eta - center
        square = moved @ moved
        middle = (square > self.rho**2) & (square <= self.delta**2)
        radius = torch.where(middle, square, 1.0).sqrt()  # no derivative of a root where it is unused, as at 0
        slope, offset = self._middle
        ratio = torch.where(middle, slope + offset / radius, self.r_hat / self.rho)
        return torch.where(square > self.delta**2, eta, center + ratio * moved)

    def inverted(self) -> RadialMap:
        """g⁻¹ as a map of its own: r̂ and ρ exchanged."""
        return RadialMap(self.center, self.delta, rho=self.r_hat, r_hat=self.rho)

    def inverse(self, theta: Tensor) -> Tensor:
        """g⁻¹(θ), the new parameters of a point θ."""
        return self.inverted()(theta)

    def jacobian(self, eta: Tensor) -> Tensor:
        """∂g/∂η = (ψ/r)·I + (ψ′ − ψ/r)·uuᵀ, u = (η − θ̂)/r; a (P, P) matrix."""
        ratio, slope, unit, _ = self._at(eta)
        eye = torch.eye(self.center.numel(), dtype=unit.dtype, device=unit.device)
        return ratio * eye + (slope - ratio) * torch.outer(unit, unit)

    def log_det(self, eta: Tensor) -> float:
        """The logarithm of the determinant, log det ∂g/∂η = log ψ′ + (P − 1) log(ψ/r)."""
        ratio, slope, _, _ = self._at(eta)
        return math.log(slope) + (self.center.numel() - 1) * math.log(ratio)

    def hessian(self, operator: Operator, *, at: Tensor | None = None, gradient: Tensor | None = None) -> Operator:
        """The Hessian of L∘g at η as an operator: JᵀHJ + Σ_i (∂_iL) ∇²g_i, with H and ∇L taken at g(η).

        Args:
            operator: H, the Hessian of L at g(η).
            at: η; by default the centre.
            gradient: ∇L at g(η); needed only between the spheres, where g is curved.

        Exact; a product costs one product with H and O(P).
        """
        ratio, slope, unit, radius = self._at(self.center if at is None else at)
        unit, bend = unit.to(operator.device, operator.dtype)[:, None], 0.0
        pull = torch.zeros_like(unit)
        if self.rho < radius <= self.delta:
            if gradient is None:
                raise InputError(
                    f"the point is at distance {figure(radius, 6)} from the centre, where the radial map is curved: "
                    "pass gradient=, that of the loss at g(at)."
                )
            bend = -self._middle[1] / radius**2  # derivative of ψ/r
            pull = gradient.detach().to(unit)[:, None]
        along = float(pull.mul(unit).sum())

        def jacobian(block: Tensor) -> Tensor:
            return ratio * block + (slope - ratio) * unit * (unit.T @ block)

        def multiply(block: Tensor) -> Tensor:
            result = jacobian(operator @ jacobian(block))
            if bend:
                inner = unit.T @ block
                result = result + bend * (pull * inner + unit * (pull.T @ block) + along * (block - 3 * unit * inner))
            return result

        return Operator(
            multiply, operator.size, dtype=operator.dtype, device=operator.device, shapes=operator.shapes or None
        )

    @property
    def _middle(self) -> tuple[float, float]:
        """ψ(r) = slope·r + offset between the spheres ρ and δ."""
        slope = (self.r_hat - self.delta) / (self.rho - self.delta)
        return slope, self.delta * (1 - slope)

    def _at(self, eta: Tensor) -> tuple[float, float, Tensor, float]:
        """ψ/r, ψ′, the unit vector u and r at a point."""
        moved = eta.detach() - self.center.to(eta)
        radius = float(moved.norm())
        unit = moved / radius if radius else moved
        if radius > self.delta:
            return 1.0, 1.0, unit, radius
        if radius > self.rho:
            slope, offset = self._middle
            return slope + offset / radius, slope, unit, radius
        return self.r_hat / self.rho, self.r_hat / self.rho, unit, radius


class _Radial(nn.Module):
    """A model in the parameters η: its weights are g(η). Names, buffers and submodules are the model's own."""

    def __init__(self, model: nn.Module, mapping: RadialMap, names: list[str]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        # One attribute with a name that no child of the model has. The model is held in a tuple, because its tables are
        # already this module's own.
        self._spiritlevel_radial = model, mapping, names

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs at g(η)."""
        model, mapping, names = self._spiritlevel_radial
        model.training = self.training
        own = dict(self.named_parameters())
        flat = mapping(torch.cat([own[name].reshape(-1) for name in names]))
        parts = flat.split([own[name].numel() for name in names])
        weights = {name: part.reshape(own[name].shape) for name, part in zip(names, parts, strict=True)}
        return functional_call(model, weights, args, kwargs)


@checked
@in_turn()
def radial(
    model: nn.Module,
    *,
    delta: float,
    rho: float,
    r_hat: float,
    center: Tensor | None = None,
    data: Any = None,
    **reading: Unpack[Reading],
) -> Transformed:
    """The same function in radially stretched parameters: the Hessian at a minimum becomes (r̂/ρ)²∇²L.

    The new model holds η = g⁻¹(θ) and computes with g(η), see `RadialMap`; parameter names stay. Its loss surface is
    the old one outside the ball of radius δ around the centre, and stretched inside, so the flatness of one minimum
    can be changed while all others keep theirs. Exact up to rounding; cost and `data` as in `rescale_layers`.

    Args:
        model: any module; it is left as it was.
        delta: radius δ of the ball.
        rho: radius ρ of the inner ball in the new parameters.
        r_hat: radius r̂ of its image in the old ones.
        center: θ̂, the trainable parameters laid end to end; by default those of the model.
        data: as in `rescale_layers`.

    Reference: paper B, section A; mathematics 7.7.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> radial(net, delta=1.0, rho=0.25, r_hat=0.5).certificate.factors["0.weight"]
    0.5
    """
    sample = Sample.of(model, data, form_of(reading))
    new = copy.deepcopy(model)
    parameters = {name: p for name, p in new.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("radial: the model has no parameter that requires grad.")
    theta = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
    center = theta if center is None else center.detach()
    if center.shape != theta.shape:
        raise InputError(f"radial needs a center of shape ({theta.numel()},), got {tuple(center.shape)}.")
    for name, radius in (("delta", delta), ("rho", rho), ("r_hat", r_hat)):
        number(radius, name, above=0, most=1e100)
    mapping = RadialMap(center, delta, rho, r_hat)
    eta = mapping.inverse(theta)
    with torch.no_grad():
        for parameter, part in zip(
            parameters.values(), eta.split([p.numel() for p in parameters.values()]), strict=True
        ):
            parameter.copy_(part.reshape(parameter.shape))
    radius = float((theta - center.to(theta)).norm())
    factors: dict[str, Factor] | None = None
    if radius <= r_hat or radius > delta:
        ratio = rho / r_hat if radius <= r_hat else 1.0
        factors = {name: ratio if name in parameters else 1.0 for name, _ in new.named_parameters()}
    wrapped = _Radial(new, mapping, list(parameters))
    certificate = sample.certify("radial", model, wrapped, factors=factors)
    return Transformed(wrapped, certificate, linear=radius > delta)
