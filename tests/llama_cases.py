"""Make small LLaMA models with random weights, on every mesh of up to four ranks."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from oracle import reference
from oracle.once import once
from oracle.strategies import seeds
from torch import Tensor, nn

import sp_core as sp
from sp_core.llama import Grid, Llama, LlamaConfig
from sp_core.testing import device

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}
HEADS = [(8, 2), (6, 3), (5, 1), (4, 4), (6, 2)]
MESHES = {
    size: [
        {"dp": dp, "ring": ring, "ulysses": ulysses, "tp": size // (dp * ring * ulysses)}
        for dp in range(1, size + 1)
        for ring in range(1, size + 1)
        for ulysses in range(1, size + 1)
        if size % (dp * ring * ulysses) == 0
    ]
    for size in (1, 2, 3, 4)
}


class Wrapped(nn.Module):
    """A module that calls the layer inside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *given: Any) -> Any:
        return self.layer(*given)


@dataclass(frozen=True)
class Case:
    """An architecture and a seed for its weights."""

    heads: tuple[int, int]
    layers: int = 2
    head_dim: int = 4
    hidden: int = 10
    ffn: int = 7
    vocab: int = 13
    scaling: str = "none"
    tied: bool = False
    dtype: str = "float64"
    seed: int = 0
    theta: float = 100.0
    eps: float = 1e-6
    stops: tuple[int, ...] = ()

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads[0],
            num_key_value_heads=self.heads[1],
            head_dim=self.head_dim,
            rms_norm_eps=self.eps,
            rope_theta=self.theta,
            rope_scaling=SCALINGS[self.scaling],
            tie_word_embeddings=self.tied,
            max_position_embeddings=128,
            eos_token_id=self.stops,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights by checkpoint name, in float64 but exact in the case's dtype."""
        random = torch.Generator().manual_seed(self.seed)
        dtype = getattr(torch, self.dtype)
        return {
            name: (
                torch.randn(shape, generator=random, dtype=torch.float64) * 0.4 + (len(shape) == 1)
            )
            .to(dtype)
            .double()
            for name, shape in self._shapes().items()
        }

    def kept_weights(self) -> dict[str, Tensor]:
        """Return `weights`, made once for all ranks. No caller may change them."""
        with torch.inference_mode(mode=False):  # a later caller may need gradients
            return once(("weights", replace(self, stops=())), self.weights)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        e, f, (h, k) = self.hidden, self.ffn, (head * self.head_dim for head in self.heads)
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (e,),
            "self_attn.q_proj": (h, e),
            "self_attn.k_proj": (k, e),
            "self_attn.v_proj": (k, e),
            "self_attn.o_proj": (e, h),
            "post_attention_layernorm": (e,),
            "mlp.gate_proj": (f, e),
            "mlp.up_proj": (f, e),
            "mlp.down_proj": (e, f),
        }
        shapes = {
            f"model.layers.{i}.{name}.weight": shape
            for i in range(self.layers)
            for name, shape in layer.items()
        }
        head = {} if self.tied else {"lm_head.weight": (self.vocab, e)}
        return {
            "model.embed_tokens.weight": (self.vocab, e),
            **shapes,
            "model.norm.weight": (e,),
            **head,
        }

    def model(self, mesh: sp.Mesh, scheme: str | None = None, *, tp_sp: bool = False) -> Llama:
        """Return the model over a mesh, each rank with its part of the weights."""
        grid, weights = Grid.of(mesh, scheme), self.kept_weights()
        model = Llama(self.config, grid, dtype=getattr(torch, self.dtype), tp_sp=tp_sp)
        model.fill(lambda name, placement: placement.take(weights[name], grid.tensor.rank))
        if self.seed % 2:  # the state in which a `Decoder` leaves a model
            model.join_weights()
        return model

    def options(self) -> dict[str, Any]:
        """Return the options of `reference.llama`."""
        return {
            "num_heads": self.heads[0],
            "rope_theta": self.theta,
            "rope_scaling": SCALINGS[self.scaling],
            "eps": self.eps,
        }

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the reference's logits of whole sequences."""
        return reference.llama(tokens, self.weights(), **self.options())

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(
            0, self.vocab, shape, generator=torch.Generator().manual_seed(self.seed + 1)
        )


@dataclass(frozen=True)
class Damaged(Case):
    """A model that computes NaN from one token on, as with damaged weights of the embedding."""

    token: int = 0

    def weights(self) -> dict[str, Tensor]:
        found = super().weights()
        found["model.embed_tokens.weight"][self.token] = torch.nan
        return found


@st.composite
def cases(draw: st.DrawFn, max_layers: int = 2) -> Case:
    return Case(
        heads=draw(st.sampled_from(HEADS)),
        layers=draw(st.integers(1, max_layers)),
        head_dim=draw(st.sampled_from([2, 4])),
        hidden=draw(st.sampled_from([6, 10])),
        ffn=draw(st.integers(4, 9)),
        vocab=draw(st.sampled_from([8, 13])),
        scaling=draw(st.sampled_from(sorted(SCALINGS))),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float64", "float32"])),
        seed=draw(seeds()),
    )


def mesh_of(comm: Any, number: int) -> sp.Mesh:
    """Make the mesh with this number among those of `comm.size` ranks."""
    shapes = MESHES[comm.size]
    axes: dict[str, Any] = {
        axis: size for axis, size in shapes[number % len(shapes)].items() if size > 1
    }
    return sp.Mesh(comm, device=device(), **(axes or {"tp": 1}))
