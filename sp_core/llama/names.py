"""Name the weights of a `Llama` as in a Hugging Face checkpoint, and check that all are there."""

from collections.abc import Collection

from sp_core.errors import CheckpointError
from sp_core.llama.config import LlamaConfig

HEAD = "lm_head.weight"
UNUSED = (".rotary_emb.inv_freq",)  # older files hold these; they follow from the configuration
_LAYER = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


def checkpoint_name(name: str) -> str:
    """Return the name that the parameter `name` of a `Llama` has in a Hugging Face checkpoint."""
    name = ".".join(part for part in name.split(".") if part[0] != "_")  # as torch.compile adds
    return name if name.startswith("lm_head.") else f"model.{name}"


def check_names(names: Collection[str], config: LlamaConfig, where: object, remedy: str) -> None:
    """Raise CheckpointError if `names` lack a tensor of a model, or have an unknown one.

    `where` says in the error what has these names, and `remedy` what to do.
    """
    parts = [f"layers.{n}.{part}" for n in range(config.num_hidden_layers) for part in _LAYER]
    expected = {f"model.{part}.weight" for part in ("embed_tokens", "norm", *parts)}
    expected |= set() if config.tie_word_embeddings else {HEAD}
    missing = sorted(expected.difference(names))
    extra = sorted(x for x in {*names} - expected - {HEAD} if not x.endswith(UNUSED))
    if missing or extra:
        raise CheckpointError(
            f"{where} lacks {len(missing)} of the tensors that its configuration needs, "
            f"{missing[:3]}, and has {len(extra)} that it does not need, {extra[:3]}. {remedy}"
        )
