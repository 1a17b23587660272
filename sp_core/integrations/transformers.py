"""Split the sequences of a Hugging Face model over the ranks of a mesh: `parallelize`.

    every rank: the same whole input_ids, labels  ->  its shard of them  ->  the model, whose
    attention is a scheme of this library  ->  mean loss over the tokens of all ranks
    backward: gradients of the weights, which all ranks hold, are summed over the ranks at its end

Only attention, loss and gradients communicate. All other layers of the model compute on the rank's
own tokens. Shapes: B batch, S sequence, P ranks that share a sequence, H heads, D head dim, V
vocabulary.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar, cast
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.collectives.api import all_reduce
from sp_core.errors import ShapeError
from sp_core.integrations.sequences import WHOLE, byte_sums, check_inputs, digest, positions_of
from sp_core.llama.grid import Grid
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.nn.gradients import reduce_gradients
from sp_core.nn.loss import IGNORED, next_token_loss
from sp_core.nn.replicated import autocast_dtype, check_hooks, learning
from sp_core.sharding import Sharding

NAME = "sp_core"
"""The attention implementation's name in transformers."""

MODELS = ("gemma2", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""The `model_type` of each supported architecture."""

LAYOUTS = ("contiguous", "striped", "zigzag")
AXES = ("dp", "ring", "ulysses")
LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
)
"""The environment variables by which accelerate finds other processes."""

OTHER_LOSS = (
    "computes another loss than transformers, and would see only this rank's tokens. Leave it "
    "out. Compute a loss of your own from the logits of a call without labels."
)

Held = list[tuple[nn.Parameter, Tensor | None]]
"""Parameters, each with its gradient before a backward."""

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, mesh: Mesh, scheme: str = "ring", layout: str = "zigzag") -> Model:
    """Split the sequences of a causal language model of transformers over the ranks of a mesh.

    The model is changed in place. Afterwards every rank calls it as on one process, with whole
    sequences, the same on all ranks that share them: `input_ids` (B, S) and, if needed, `labels`,
    `position_ids` and an `attention_mask`. It returns the logits of the rank's own tokens,
    (B, S/P, V) in the order of the layout, and the mean loss over the tokens of all ranks.
    `loss.backward()` leaves the gradients of this loss in `.grad` on every rank; the gradients of
    several backwards add up. With `num_items_in_batch`, as Trainer passes it, the sum of the losses
    is divided by the number of labels in all micro-batches. Each replica counts its own labels.

    Positions, rotary angles, masks and labels are those of transformers on one process. Position
    ids that do not go up by one start a new document, which sees no other document; this holds for
    gpt-oss, too, where transformers ignores them. All rows of a batch have the same documents. A
    label at the first token of a document counts unless it is -100. The attention mask may hide
    padding at the end of a row, where every label is -100; the logits there are not defined.

    Args:
        model: a causal language model whose `config.model_type` is one of `MODELS`, with the same
            weights on every rank, on the device of the mesh.
        mesh: a mesh with any of the axes "ring", "ulysses" and "dp". The ranks along "ring" and
            "ulysses" share each sequence; the replicas along "dp" take different sequences.
        scheme: "allgather_kv", "ring" or "ulysses", over both axes together; or "hybrid", which
            needs both.
        layout: which rank holds which tokens: "contiguous", "striped" or "zigzag", as in
            `Sharding`.

    Returns:
        The model.

    Communication:
        Here and in each forward two agreements on arguments. In each layer, forward and backward,
        what the scheme sends; with labels what `next_token_loss` sends. At the end of each backward
        one agreement, an all-reduce of a number per parameter, and one per dtype of all gradients.

    Raises:
        ValueError, ShapeError, TypeError: a model, mesh, scheme or layout that is not supported.
        CollectiveMismatch: ranks with different weights or arguments.

    These errors are raised on every rank. The forward, too, raises them: for inputs that differ
    between ranks, a cache, `output_attentions` or attention dropout, for example. A backward that
    leaves no gradient in `.grad`, as of `torch.autograd.grad`, raises a RuntimeError, and so does
    one that uses a weight added after the last forward. After any error in a backward `.grad` is
    what it was before, except that of such a weight.
    """
    arguments.check_type("mesh", mesh, Mesh, "Make one, such as Mesh(MPI.COMM_WORLD, ring=4).")

    def call() -> str:
        found = _checked(model, mesh, layout)
        sums = [sums for x in found for sums in byte_sums(x.detach())]
        kinds = blake2b(repr([(x.shape, x.dtype) for x in found]).encode(), digest_size=4)
        settings = cast("Any", model.config).to_dict() | {"_name_or_path": ""}  # differs by node
        return (
            f"parallelize({type(model).__name__} with {len(found)} parameters and buffers "
            f"#{kinds.hexdigest()} of values #{digest(*sums)}, {scheme=}, {layout=}, "
            f"{sorted(settings.items())})"
        )

    mesh[tuple(mesh.axes)].agree_on(call)
    _Parallel(model, Grid.of(mesh, scheme), layout)
    return model


@contextmanager
def one_process() -> Iterator[None]:
    """Hide the other processes from accelerate while `TrainingArguments` are made.

    The Trainer of each rank then takes all batches instead of a share, as `parallelize` needs it.
    If the process sees at most one GPU, it does not wrap the model either. At the end of the `with`
    block the environment variables of launchers are put back.
    """
    hidden = {name: os.environ.pop(name) for name in LAUNCHERS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


class _Parallel:
    """Hold the hooks that split inputs of a model over ranks, average the loss and sum gradients.

    The constructor puts the scheme, the loss and the hooks into the model.
    """

    def __init__(self, model: Any, grid: Grid, layout: str) -> None:
        from transformers import AttentionInterface

        self._model, self._grid, self._layout = model, grid, layout
        self._held: Held = []
        self._has_loss = False
        AttentionInterface.register(NAME, _attend)
        shared, own = model.config, copy.deepcopy(model.config)
        for part in model.modules():  # other models may share the configuration
            if getattr(part, "config", None) is shared:
                part.config = own
        model.set_attn_implementation(NAME)
        model.loss_function = self._loss
        model.register_forward_pre_hook(self._shard, with_kwargs=True)
        model.register_forward_hook(self._watch, with_kwargs=True)
        self._hook_weights()

    def _shard(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        """Replace whole sequences by this rank's shards. Return the forward's (args, kwargs)."""
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
        comm, items = self._grid.sequence, given.get("num_items_in_batch")
        kind, labelled = type(model).__name__, given.get("labels") is not None
        how = f"autocast={autocast_dtype(self._grid.data.device)}, {learning(model)}"

        def call() -> str:
            whole = [given.get(name) for name in WHOLE]
            return (
                f"{kind}.forward of {tuple(given['input_ids'].shape)} tokens "
                f"#{digest(*whole)}, grad={torch.is_grad_enabled()}, training={model.training}, "
                f"{how}"
            )

        with agreeing_in_turn() as agree_on:
            agree_on(comm, call, lambda: self._check(given))
            counts = agree_on(
                self._grid.replicas,
                lambda: f"{kind}.forward, {labelled=}, counted={items is not None}, {how}",
                lambda: int(items or 0),
            )
        self._hook_weights()
        self._has_loss = False
        tokens, positions, documents = given["input_ids"], *positions_of(given)
        sharding: Sharding = getattr(Sharding, self._layout)(tokens.shape[1], comm.size)
        whole = {"input_ids": tokens, "position_ids": positions}
        if labelled:
            whole["labels"] = F.pad(given["labels"], (0, 1), value=IGNORED)[:, 1:]
        shards: dict[str, Any] = {n: sharding.shard(x, comm.rank, 1) for n, x in whole.items()}
        if items is not None:
            shards["num_items_in_batch"] = sum(counts)

        def attention(*qkv: Tensor, window: int | None, **terms: Any) -> Tensor:
            mask = Mask(causal=True, window=window, documents=documents)
            return cast("Tensor", self._grid.attention(*qkv, sharding=sharding, mask=mask, **terms))

        return (), given | shards | {"attention_mask": None, "use_cache": False, NAME: attention}

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Return the mean loss over the labels of all ranks; transformers calls this.

        labels (B, S/P) hold for each token the token after it: `_shard` has shifted them. If
        `num_items_in_batch` is given, `_shard` has added up the counts of all replicas, and the sum
        of the losses is divided by that instead.
        """
        grid, count, self._has_loss = self._grid, num_items_in_batch, True
        return next_token_loss(logits, labels, tensor=grid.tensor, data=grid.data, count=count)

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raise an error, on this rank, if the model cannot compute a forward of `given`."""
        model, config = self._model, self._model.config
        _check_config(model, self._loss, self._begin)
        if config._attn_implementation != NAME:
            raise ValueError(
                f"the attention implementation was changed to {config._attn_implementation!r} "
                f"after parallelize; it must stay {NAME!r}. Load the model again for another one."
            )
        if nn.parallel.DistributedDataParallel._active_ddp_module is not None:
            raise ValueError(
                "a parallelized model was called inside DistributedDataParallel, which divides its "
                "gradients. Call it without; make TrainingArguments inside `with one_process()`."
            )
        check_inputs(given, config, self._grid)

    def _unhooked(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable weights, with names, whose gradients do not make `_begin` run."""
        return [
            (name, weight)
            for name, weight in self._model.named_parameters()
            if weight.requires_grad and self._begin not in (weight._backward_hooks or {}).values()
        ]

    def _hook_weights(self) -> None:
        """Let `_begin` run before a trainable weight gets a gradient."""
        for _, weight in self._unhooked():
            weight.register_hook(self._begin)

    def _watch(self, model: object, args: object, kwargs: Mapping[str, Any], out: Any) -> None:
        """Let `_begin` run as soon as a backward reaches a tensor among the results of a forward.

        Without these hooks, if the weights outside reentrant checkpoints are frozen, the backward
        of each checkpoint would sum its gradients by itself.
        """
        if kwargs.get("labels") is not None and not self._has_loss:
            raise ValueError(f"{type(model).__name__}.forward {OTHER_LOSS}")
        for x in tree_leaves(tuple(out.values() if isinstance(out, Mapping) else out)):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(self._begin)

    def _begin(self, grad: object) -> None:
        """Set earlier gradients aside when a backward begins. When it ends, sum the new ones.

        If it fails, put the earlier ones back.
        """
        if self._held:
            return
        late = [name for name, weight in self._unhooked() if weight.grad is not None]
        if late:
            raise RuntimeError(
                f"{late} have gradients of this rank alone, because they were added or unfrozen "
                "after the last forward of the model. Do this before a forward."
            )
        self._held = held = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
        for parameter, _ in held:
            parameter.grad = None
        engine: Any = torch.autograd.Variable._execution_engine
        reduce = partial(self._reduce, held)
        finalize(reduce, _put_back, held)  # the engine drops `reduce` also after an error
        engine.queue_callback(reduce)

    @torch.no_grad()
    def _reduce(self, held: Held) -> None:
        """Sum the gradients of one backward over the ranks, and add them to the earlier ones.

        `held` has each parameter with the gradient it had before, or None. Afterwards it is empty.
        A parameter that no rank has used, such as that of an idle expert, gets no gradient.
        """
        grid = self._grid
        own = torch.tensor([p.grad is not None for p, _ in held], device=grid.data.device)
        used = all_reduce(own.long(), comm=grid.data, op="max").tolist()
        if not any(used):
            raise RuntimeError(
                "a backward of a parallelized model has left no gradient in .grad of its "
                "parameters. Call loss.backward() instead of torch.autograd.grad."
            )
        wanted = [p for (p, _), is_used in zip(held, used, strict=True) if is_used]
        reduce_gradients(wanted, data=grid.data)
        for parameter, earlier in held:
            if earlier is not None:
                new = parameter.grad
                parameter.grad = earlier if new is None else earlier.add_(new)
        held.clear()


def _put_back(held: Held) -> None:
    """Set the gradient of each parameter to the one held, or None. Then empty `held`."""
    for parameter, earlier in held:
        parameter.grad = earlier
    held.clear()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sp_core: Callable[..., Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of this rank's queries (B, H, S/P, D) as transformers asks for it.

    `s_aux` are the sinks of the heads, (H,). Return (B, S/P, H, D), and None for attention weights.
    Under autocast values have the lower dtype, and rotated queries and keys that of the angles.
    """
    if sp_core is None or dropout:
        raise RuntimeError(
            f"attention {NAME!r} was called with {dropout=} and "
            f"{'no' if sp_core is None else 'a'} parallelized forward; it needs dropout=0.0 "
            "and a call of the model from parallelize(model, mesh), not its forward nor a part."
        )
    qkv = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    terms = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux}
    return sp_core(*qkv, window=sliding_window, **terms), None


def _checked(model: Any, mesh: Mesh, layout: str) -> list[Tensor]:
    """Check the arguments of `parallelize`. Return the parameters and buffers of the model."""
    from transformers import PreTrainedModel
    from transformers.loss.loss_utils import ForCausalLMLoss

    arguments.check_type("model", model, PreTrainedModel, "Load it with AutoModelForCausalLM.")
    other = [axis for axis, size in mesh.axes.items() if axis not in AXES and size > 1]
    if other:
        raise ShapeError(
            f"parallelize does not know the axis {other[0]!r} of the mesh. Name axes 'ring' or "
            "'ulysses' if they share a sequence, and 'dp' if they have other sequences."
        )
    if layout not in LAYOUTS:
        raise ValueError(f"{layout=} was given; pass one of {LAYOUTS}.")
    kind, config = type(model).__name__, model.config
    if config.model_type not in MODELS or not model._supports_attention_backend:
        raise ValueError(
            f"{kind} is of model_type {config.model_type!r}; {MODELS} are supported, and their "
            "attention must go through transformers' AttentionInterface."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{kind} has no language model head. Use the model's ForCausalLM class.")
    if config._attn_implementation == NAME:
        raise ValueError(f"this {kind} was parallelized before. Load it again.")
    _check_config(model, ForCausalLMLoss)
    return [*model.parameters(), *model.buffers()]


def _check_config(model: Any, loss: object, hook: object = None) -> None:
    """Raise a ValueError for settings or hooks of a model that `parallelize` does not support.

    `loss` is the loss function that the model must have, `hook` one that its weights may have.
    """
    if torch.is_grad_enabled():
        check_hooks(model, hook)
    if model.loss_function != loss:
        raise ValueError(f"{type(model).__name__}.loss_function {OTHER_LOSS}")
    outputs = ("output_attentions", "output_router_logits")
    wrong = [f"{name}=True" for name in outputs if getattr(model.config, name, False)]
    wrong += ["is_causal=False"] * (not getattr(model.config, "is_causal", True))
    wrong += [
        f"{name}={value!r}"
        for module in model.modules()
        for name, value in vars(module).items()
        if (name in ("attention_dropout", "neftune_noise_alpha") and value)
        or (name == "is_causal" and not value)
        or (name == "rope_type" and value in ("dynamic", "longrope"))
    ]
    if wrong:
        raise ValueError(
            f"{type(model).__name__} has {sorted({*wrong})}, which parallelize does not support. "
            "Load it without these settings (dropout: from_pretrained(..., attention_dropout=0.0))."
        )
