"""The base class of layers whose weights every rank holds whole, and the check of a layer's input.

Every rank applies such a layer to its own tokens, so the gradient that a rank computes for a weight
covers only these. The backward sums gradients over the ranks: after `loss.backward()` on all ranks
every rank holds the gradient of the sum of all ranks' losses, and equal weights stay equal. Only
uses in the layer's `forward` are summed, not a term of the loss that reads a weight itself.
"""

from typing import cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize

from sp_core.arguments import check_communicator, check_kept, check_positive, check_tensor
from sp_core.collectives.build import SUMMABLE
from sp_core.collectives.differentiable import copy_all, describe_all
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.nn.rope import Rope
from sp_core.sharding import Sharding, check_sharding

Setting = int | float | Rope | None
"""The types of settings of a layer that change its result and that no scheme compares."""


class ReplicatedLayer(nn.Module):
    """A layer whose weights every rank holds whole, and which each rank applies to its own tokens.

    Subclasses call `weights` in `forward`, and compute with the tensors that it returns. A linear
    sub-layer may be replaced and may have hooks: `linear` calls it. Parameters of a replaced
    sub-layer may be missing, and have any dtype if they are frozen. It must not run a reentrant
    `torch.utils.checkpoint`, whose backward finds weights of which no gradients are summed.

    Args:
        hidden: E, the features of a token in the layer's input.
        comm: the ranks. All of them call the layer, with equal weights and settings.

    Raises:
        TypeError, ValueError: comm is no communicator, or hidden is not a number of at least 1.
    """

    def __init__(self, hidden: int, comm: Communicator) -> None:
        super().__init__()
        check_communicator(comm)
        check_positive(hidden=hidden)
        self.hidden = int(hidden)
        self.comm = comm

    def extra_repr(self) -> str:
        """Return the settings, which must be equal on all ranks, as text. `print` shows it, too."""
        kept = {name: x for name, x in vars(self).items() if name[0] != "_" and name != "training"}
        return ", ".join(f"{name}={x}" for name, x in kept.items() if isinstance(x, Setting))

    def weights(self, x: Tensor, *sharding: Sharding) -> dict[str, Tensor]:
        """Check a forward call on all ranks, and return the parameters to compute with.

        Args:
            x: this rank's input, (..., hidden).
            sharding: at most one. If given, x must be (B, S/P, hidden) with the S/P tokens that the
                sharding gives this rank.

        Returns:
            The layer's parameters by name, and what stands in their place, such as buffers or
            weights that a parametrization computes. Backward sums the gradient of each over the
            ranks. A trainable parameter that a replaced sub-layer does not use gets a
            gradient of zeros, not None, on several ranks.

        Communication:
            One agreement (32-byte all-reduce). Backward one agreement and one all-reduce per dtype
            of all gradients of the layer, if a parameter requires grad and there are two ranks.

        Raises:
            ShapeError, DtypeError, DeviceError, RankError: on every rank, also if only one rank's
                input or weights are wrong.
            ValueError: on every rank, if x was made in `torch.inference_mode()` and weights require
                a gradient, or if parametrized weights learn inside of torch's `parametrize.cached`.
            CollectiveMismatch: on every rank, if settings of the layer, shape, dtype or
                requires_grad of the weights, the dtype or requires_grad of x, autocast, or the
                sharding differ between ranks.
            TypeError: on every rank, if a sub-layer communicates, because the gradients of its
                weights would be summed twice.
        """
        held: dict[str, Tensor] = dict(self.named_parameters(remove_duplicate=False))
        held |= self._others()
        parameters = tuple(dict.fromkeys(held.values()))
        kind = type(self).__name__

        def call() -> str:
            self._check_parts()
            for name, weight in held.items():
                if weight.requires_grad or self._multiplies(name, hooked=False):
                    dtypes = SUMMABLE if weight.requires_grad else None
                    check_tensor(weight, self.comm, f"{kind}.{name}", dtypes)
            tokens, owned = None, ""
            for each in sharding:
                check_sharding(each, self.comm, kind)
                tokens, owned = each.local_len(self.comm.rank), f", {each.fingerprint}"
            check_input(
                x,
                self.comm,
                f"{kind} of hidden size {self.hidden}",
                next((w for n, w in held.items() if n != "sinks" and self._multiplies(n)), x),
                self.hidden,
                tokens,
            )
            check_kept(x, *parameters)
            return (
                f"{kind}({self.extra_repr()})({x.dtype}, requires_grad={x.requires_grad}{owned}): "
                f"{describe_all(parameters, self.comm)}, autocast={autocast_dtype(x.device)}"
            )

        self.comm.agree_on(call)
        if self.comm.size == 1:
            return held
        copies = dict(zip(parameters, copy_all(parameters, self.comm), strict=True))
        return {name: copies[weight] for name, weight in held.items()}

    def _check_parts(self) -> None:
        kind = type(self).__name__
        for name, part in self.named_modules():
            if "comm" in vars(part) and part is not self:
                raise TypeError(
                    f"{kind}.{name} is a {type(part).__name__}, which communicates; needed is "
                    f"a layer that does not, such as nn.Linear. Replace the {kind} instead."
                )
            if (
                parametrize._cache_enabled
                and self.comm.size > 1
                and torch.is_grad_enabled()
                and parametrize.is_parametrized(part)
                and any(weight.requires_grad for weight in part.parameters())
            ):
                raise ValueError(
                    f"{kind}: {name or 'it'} has a parametrization, and parametrize.cached() "
                    "may hold an earlier weight, whose gradient the ranks do not sum. Call "
                    "the layer outside of parametrize.cached()."
                )

    def _others(self) -> dict[str, Tensor]:
        """Return the tensors by name that the layer reads as weights and that are no parameters."""
        parts: dict[str, nn.Module] = {"": self}
        parts |= {
            f"{name}.": x
            for name, x in self._modules.items()
            # not the old `weight_norm`, whose hook makes a weight of other parameters
            if type(x) is nn.Linear and x._parameters.keys() <= {"weight", "bias"}
        }
        computed = {name: getattr(self, name) for name in getattr(self, "parametrizations", ())}
        return computed | {
            before + name: x
            for before, part in parts.items()
            for name in ("weight", "bias", "sinks")
            if isinstance(x := part._buffers.get(name, vars(part).get(name)), Tensor)
        }

    def _multiplies(self, name: str, *, hooked: bool = True) -> bool:
        """Return whether a parameter belongs to no sub-layer that was replaced, or has hooks."""
        part = getattr(self, name.split(".", maxsplit=1)[0]) if "." in name else None
        return part is None or (type(part) is nn.Linear if hooked else is_plain(part))

    def linear(self, name: str, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Apply the sub-layer `name` to x, with the parameters that `weights` has returned.

        The caller may have replaced the `nn.Linear`, or registered hooks on it.
        """
        part = getattr(self, name)
        if not is_called(part):  # a call of the module takes 20 microseconds more
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        # Each module once: `functional_call` does not restore a module that it finds twice.
        own = {
            key: weights[f"{name}.{key}"]
            for path, sub in part.named_modules()
            for key, _ in sub.named_parameters(path, recurse=False, remove_duplicate=False)
        }
        own |= {  # these may be no parameters
            key: weights[path] for key in ("weight", "bias") if (path := f"{name}.{key}") in weights
        }
        out = cast("Tensor", functional_call(part, own, (x,), tie_weights=False))
        check_checkpoint(f"{type(self).__name__}.{name}", out, x, *own.values())
        return out


def is_plain(part: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether a module is exactly a `kind`, without hooks or a `forward` of its own."""
    return type(part) is kind and not (
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or "forward" in part.__dict__
    )


def is_called(part: nn.Module) -> bool:
    """Return whether `ReplicatedLayer.linear` calls a sub-layer, and does not only read weights."""
    return not is_plain(part) or nn.modules.module._has_any_global_hook()


def check_checkpoint(name: str, out: Tensor, *given: Tensor) -> None:
    """Raise ValueError, on this rank, if a reentrant checkpoint is between `out` and what it uses.

    Its backward runs the module `name` again, with weights of which no gradients are summed.
    """
    found, waiting = {x.grad_fn for x in given}, [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
            if node.name() == "CheckpointFunctionBackward":
                raise ValueError(
                    f"{name} calls torch.utils.checkpoint with use_reentrant=True, which would "
                    "leave gradients of its weights unsummed. Pass use_reentrant=False."
                )


def check_summed(layer: nn.Module, comm: Communicator, *names: str) -> None:
    """Raise TypeError, on every rank, if the backward of a part of a layer sums too few gradients.

    Ranks without such an error send nothing here: their next agreement over `comm` tells them.
    """
    parts = {name: getattr(layer, name) for name in names if torch.is_grad_enabled()}
    wrong = [name for name, part in parts.items() if _leaves_out(part, comm)]

    def refuse() -> str:
        kind, part = type(layer).__name__, type(parts[wrong[0]])
        raise TypeError(
            f"{kind}.{wrong[0]} is a {part.__module__}.{part.__qualname__} with trainable weights, "
            f"and nothing shows that their gradients are summed over {comm.name}. Pass "
            "layers with the same comm that inherit from ReplicatedLayer, as RMSNorm does, or "
            "parallel linear layers with a sharding; or freeze the weights."
        )

    if wrong:
        comm.agree_on(refuse)


def _leaves_out(part: nn.Module, comm: Communicator) -> bool:
    """Return whether a part has trainable weights outside of layers that sum over `comm`."""
    sums = isinstance(part, ReplicatedLayer) or getattr(part, "lengths", None) is not None
    if "comm" in vars(part) and (comm.size == 1 or (sums and vars(part)["comm"] is comm)):
        return False
    own = any(x.requires_grad for x in part.parameters(recurse=False))
    return own or any(_leaves_out(x, comm) for x in part.children())


def check_input(
    x: Tensor,
    comm: Communicator,
    layer: str,
    weight: Tensor,
    features: int,
    tokens: int | None = None,
) -> None:
    """Raise an error, on this rank, if x does not fit a layer.

    Args:
        x: this rank's input.
        comm: the communicator on whose device x must be.
        layer: the name of the layer, for error texts.
        weight: a weight of the layer; x must have its dtype, except under autocast.
        features: the needed length of the last dim.
        tokens: the needed length of dim 1 of a 3-dim x; None takes any leading dims.

    Raises:
        DtypeError, DeviceError, ShapeError: naming what x has and what is needed.
    """
    check_tensor(x, comm)
    before = x.shape[:-1] if tokens is None else (*x.shape[:1], tokens)
    if x.shape != (needed := (*before, features)):
        raise ShapeError(
            f"{layer}: x has shape {tuple(x.shape)}; {needed} is needed on rank {comm.rank}."
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise DtypeError(
            f"{layer} has weights of {weight.dtype} and was given {x.dtype}. Convert one of them."
        )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast lowers products on a device; None without autocast."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def precision(dtype: torch.dtype, device: torch.device) -> str:
    """Return a model's dtype and that of autocast as a text to compare between ranks.

    Raises:
        DtypeError: on this rank: both are half types, but not the same one. Their sums are wider,
            and torch cannot concatenate one under autocast to the other, as decoding does.
    """
    lower = autocast_dtype(device)
    if dtype.itemsize == 2 and lower not in (None, dtype):
        raise DtypeError(
            f"the model of {dtype} was called under autocast to {lower}, and torch does not mix "
            f"two half types. Pass dtype={dtype} to torch.autocast, or convert the model."
        )
    return f"{dtype}, autocast={lower}"


def gradient_hooks(weight: Tensor) -> list[object]:
    """Return the hooks on a weight's gradient, and optimizers that step in its backward."""
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    hooks = [hook for name in names for hook in (getattr(weight, name) or {}).values()]
    return [*hooks, *getattr(weight, "_in_backward_optimizers", ())]


def check_hooks(module: nn.Module, own: object = None) -> None:
    """Raise a ValueError, on this rank, if a weight has another hook on its gradient than `own`.

    Call it for modules whose gradients are summed over ranks after the backward.
    """
    for name, weight in module.named_parameters():
        if any(hook != own for hook in gradient_hooks(weight)):
            raise ValueError(
                f"{name} has a hook on its gradient, which would see only this rank's part. Remove "
                "it, and change gradients or step the optimizer after backward."
            )


def learning(module: nn.Module) -> str:
    """Return a text that is equal on ranks on which the same weights get gradients."""
    flags = [torch.is_grad_enabled() and weight.requires_grad for weight in module.parameters()]
    return f"{sum(flags)} of {len(flags)} weights get gradients #{crc32(bytes(flags)):08x}"


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return `parameter.grad`, or new zeros of the dtype that it would have."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=parameter.grad_dtype)
    return parameter.grad
