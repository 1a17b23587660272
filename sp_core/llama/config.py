"""`LlamaConfig`, the architecture of a LLaMA: entries of a Hugging Face `config.json`.

Entries that would change the results of the model and are not supported raise an error.
"""

import errno
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import CheckpointError, ShapeError
from sp_core.kinds import is_whole
from sp_core.nn.rope import Rope
from sp_core.scheduling import split_stages

Tokens = Sequence[Sequence[int]]
"""For each sequence its tokens; lengths may differ."""
ARCHITECTURE = "LlamaForCausalLM"
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "quantization_config": None,
    "partial_rotary_factor": 1,
    "is_causal": True,
    "per_layer_config": {},
}
"""For some entries of `config.json` the one supported value, which is the default."""
_REMEDIES = dict.fromkeys(
    ("hidden_act", "attention_bias", "mlp_bias"),
    " `parallelize` computes such a model of transformers.",
) | {"attention_dropout": " It changes training only; to generate, set it to 0 in config.json."}
"""For some of these entries, what to do about another value."""
_ROPE, _CONTEXT = ("rope_scaling", "rope_parameters"), "original_max_position_embeddings"
_ABSENT = errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG
"""The errors by which the system says that a path is not there."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Entries that every `config.json` must have."""
_TOKENS = "eos_token_id", "bos_token_id", "pad_token_id"


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture of a LLaMA, with the names of Hugging Face.

    Args:
        vocab_size, hidden_size, intermediate_size: V, E and F, the feed-forward dim.
        num_hidden_layers: the number of transformer blocks.
        num_attention_heads: H, the number of query heads.
        num_key_value_heads: K, a divisor of H.
        head_dim: D, an even number.
        rms_norm_eps: the number added to the mean square in the norms.
        rope_theta, rope_scaling: `base` and `scaling` of `sp_core.nn.rope.Rope`. The scaling is
            kept as a dict without rope_theta, or as None if it changes nothing.
        tie_word_embeddings: whether the output layer uses the weight of the embedding.
        max_position_embeddings: the most tokens that a sequence may have in `generate`, `Decoder`
            and `prefill_unequal`. `Llama.forward` and training take longer ones, too.
        eos_token_id: tokens after which generation of a sequence ends; a number, a list or None as
            in a `config.json` becomes a tuple. A file without the entry means none, unlike in
            transformers, where it means the token 2.
        bos_token_id: kept for `save`.
        pad_token_id: as in transformers, the embedding of this token gets no gradient, also where
            the token ends a text. A head that is tied to the embedding does.

    Raises:
        CheckpointError: an entry of another type or out of range, sizes that do not fit together,
            or an unknown rotary embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Convert numbers of NumPy. Raise CheckpointError if entries are not supported."""
        vars(self).update({name: arguments.plain(x) for name, x in vars(self).items()})
        sizes = *_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"
        others = "rms_norm_eps", "rope_theta", "tie_word_embeddings"
        try:
            arguments.check_positive(**{name: getattr(self, name) for name in sizes})
            arguments.check(**{name: getattr(self, name) for name in others})
            self.rope()
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"the configuration is not supported: {error}") from error
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads={self.num_attention_heads} and "
                f"num_key_value_heads={self.num_key_value_heads} were given; "
                "the first must be a multiple of the second."
            )
        tokens = {name: _tokens(name, getattr(self, name)) for name in _TOKENS}
        scaling = _scaling(self.rope_scaling or {})
        vars(self).update(eos_token_id=tokens["eos_token_id"], rope_scaling=scaling)

    @property
    def layer_weights(self) -> int:
        """Return the number of elements in the matrices of one block, without norms."""
        heads = self.num_attention_heads + self.num_key_value_heads
        return self.hidden_size * (2 * heads * self.head_dim + 3 * self.intermediate_size)

    @property
    def padding(self) -> int | None:
        """Return the token whose vector in the embedding gets no gradient; None if there is none.

        As in `nn.Embedding`, a negative `pad_token_id` counts from the end of the vocabulary.
        """
        pad, size = self.pad_token_id, self.vocab_size
        return range(size)[pad] if isinstance(pad, int) and -size <= pad < size else None

    def rope(self) -> Rope:
        """Return the rotary embedding, a new `Rope`."""
        return Rope(self.head_dim, self.rope_theta, self.rope_scaling)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Self:
        """Read the configuration of a model folder.

        The entry eos_token_id of `generation_config.json`, if there, replaces that of
        `config.json`.

        Raises:
            CheckpointError: no `config.json`, no JSON, an entry that is not supported, or an
                adapter beside it.
            TypeError: `folder` is no path.
        """
        arguments.check(folder=folder)
        if is_there(adapter := Path(folder) / "adapter_config.json"):
            read_json(adapter)  # the system may not say whether it is there
            raise CheckpointError(
                f"{folder} has an adapter, such as LoRA, which would not be applied. Merge it into "
                f"the weights, as merge_and_unload() of peft does, or move {adapter} away."
            )
        path, generation = Path(folder) / "config.json", Path(folder) / "generation_config.json"
        values = read_json(path)
        ends = read_json(generation).get("eos_token_id") if is_there(generation) else None
        try:
            if ends is None:
                return cls.from_dict(values)
            config = cls.from_dict({**values, "eos_token_id": None})
            path = generation
            return replace(config, eos_token_id=ends)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the contents of a `config.json`. Ignore entries not needed.

        Raises:
            CheckpointError: an entry is missing, or would change the results and is not supported.
        """
        architectures = values.get("architectures") or [ARCHITECTURE]
        is_llama = isinstance(architectures, Collection) and ARCHITECTURE in architectures
        if values.get("model_type") != "llama" or not is_llama:
            raise CheckpointError(
                f"model_type {values.get('model_type')!r} with architectures {architectures} is "
                f"not supported; only {ARCHITECTURE} is. `parallelize` computes causal language "
                "models of the types in sp_core.integrations.transformers.MODELS."
            )
        _check_only(values)
        names = cls.__dataclass_fields__
        given = {x: arguments.plain(values[x]) for x in names if values.get(x) is not None}
        missing = [name for name in _SIZES if name not in given]
        if missing:
            raise CheckpointError(f"the configuration lacks {', '.join(missing)}.")
        hidden, heads = given["hidden_size"], given["num_attention_heads"]
        divides = all(is_whole(n) and n > 0 for n in (heads, hidden))
        inferred = {"num_key_value_heads": heads, "head_dim": hidden // heads if divides else 1}
        return cls(**{**inferred, **given, **_rope(values)})

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a `config.json`, which `from_dict` reads again."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_act": "silu",
            **vars(self),
            "rms_norm_eps": float(self.rms_norm_eps),  # transformers refuses an int
            "rope_scaling": self.rope_scaling and dict(self.rope_scaling),
            "eos_token_id": list(self.eos_token_id),
        }


def is_there(path: Path) -> bool:
    """Return whether a path is there, unless the system cannot tell: then opening it says why."""
    try:
        os.stat(path)  # noqa: PTH116
    except OSError as error:
        return error.errno not in _ABSENT
    except ValueError:  # the character 0
        return False
    return True


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file as a dict.

    Raises:
        CheckpointError: the file is missing, cannot be read, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there. Give the folder of a model in Hugging Face's format, or one of "
            "save_training."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
    if not isinstance(values, dict):
        raise CheckpointError(
            f"{path} holds a {type(values).__name__}, needed an object. Copy it again."
        )
    return values


def _tokens(name: str, given: Any) -> tuple[int, ...]:
    """Return the tokens that an entry gives: a number, a list of numbers, or None for no token.

    Raises:
        CheckpointError: the entry `name` is something else.
    """
    tokens = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise CheckpointError(
            f"{name}={given!r} was given, needed a number, a list of numbers, or null."
        )
    return tokens


def _check_only(values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an entry of `_ONLY` with another value than the supported one."""
    for name, supported in _ONLY.items():
        if values.get(name) not in (supported, None):
            raise CheckpointError(
                f"{name}={values[name]!r} is not supported; only {supported!r} is."
                f"{_REMEDIES.get(name, '')}"
            )


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields rope_theta and rope_scaling from the contents of a `config.json`.

    Files of transformers 5 hold both in the entry rope_parameters; older files have one entry each.
    As in transformers, rope_parameters is not read if rope_scaling has entries, and a scaling
    without original_max_position_embeddings gets that beside it, else max_position_embeddings.

    Raises:
        CheckpointError: an entry is no object, is not supported, or contradicts those that count.
    """
    objects = [values.get(name) or {} for name in _ROPE]
    for each in objects:
        if not isinstance(each, Mapping):
            raise CheckpointError(
                f"the scaling of the rotary embedding is {each!r}, needed an object or null."
            )
        _check_only(each)
    first, other = objects if objects[0] else objects[::-1]
    bases = [each.get("rope_theta") for each in (first, values, other)]
    base = next((x for x in bases[:2] if x is not None), 10000.0)
    scaling, unread = map(_scaling, (first, other))
    context = values.get(_CONTEXT)  # in transformers, it replaces that of the scaling
    lengths = context, values.get("max_position_embeddings"), LlamaConfig.max_position_embeddings
    for each in (scaling or {}, unread or {}):
        if each.get("rope_type") in ("llama3", "yarn"):
            each.setdefault(_CONTEXT, next(x for x in lengths if x is not None))
    pairs = [(unread, scaling), (context, (scaling or {}).get(_CONTEXT, context))]
    if any(x not in (kept, None) for x, kept in [*((x, base) for x in bases), *pairs]):
        said = {name: values[name] for name in (*_ROPE, "rope_theta", _CONTEXT) if name in values}
        raise CheckpointError(
            f"entries of the rotary embedding contradict each other: {said}. Keep one rope_theta "
            f"and one scaling, those with which the model was trained."
        )
    return {"rope_theta": base, "rope_scaling": scaling}


def _scaling(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the scaling in rope_scaling or rope_parameters, None if frequencies are not scaled.

    Numbers become int or float, which JSON can hold. The entry type of older files becomes
    rope_type. Nulls are left out, but for truncate, whose null means False.
    """
    unused = "rope_theta", "partial_rotary_factor", "type"
    kind = entry.get("type") if entry.get("rope_type") is None else entry["rope_type"]
    kept = {
        name: float(x) if isinstance(x, Fraction) else arguments.plain(x)
        for name, x in {**entry, "rope_type": kind}.items()
        if name not in unused and (x is not None or name == "truncate")
    }
    return None if not kept or kind == "default" else kept


def stage_layers(config: LlamaConfig, stages: int) -> tuple[range, ...]:
    """Return for each stage a range of layers, such that the greatest work of a stage is least.

    The head counts as work of the last stage.

    Raises:
        ShapeError: more stages than layers.
    """
    costs = [config.layer_weights] * config.num_hidden_layers
    return split_stages(costs, stages, last=config.hidden_size * config.vocab_size)


def check_ranks(config: LlamaConfig, size: int) -> None:
    """Raise an error if some of `size` tensor ranks would hold no part of a weight.

    Raises:
        ShapeError: more tensor ranks than heads, feed-forward features or tokens in the vocabulary.
    """
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) < size:
            raise ShapeError(
                f"{size} tensor ranks are too many for {name}={getattr(config, name)}. Use tp <= "
                f"{getattr(config, name)}, and more "
                "ranks along another axis."
            )


def flat(sequences: Tokens) -> Tensor:
    """Return the tokens of all sequences, one after the other, as a 1-dim int64 tensor."""
    return torch.tensor(
        [token for tokens in sequences for token in tokens], dtype=torch.int64, device="cpu"
    )


def check_sequences(
    sequences: Tokens, config: LlamaConfig, what: str = "sequence", more: int | None = None
) -> None:
    """Raise ValueError for a sequence without tokens, or a token outside the vocabulary.

    Also, unless `more` is None, for a sequence that with `more` tokens exceeds the positions of the
    model. `what` names a sequence in the error.
    """
    for number, tokens in enumerate(sequences):
        if not tokens:
            raise ValueError(
                f"{what} {number} is empty; leave it out, or give it at least one token, such as "
                f"the one that begins a text."
            )
        if more is not None:
            check_length(f"{what} {number}", len(tokens), more, config)
    check_tokens([*chain.from_iterable(sequences)], config)


def check_length(name: str, length: int, more: int, config: LlamaConfig) -> None:
    """Raise ValueError if a sequence of `length` tokens with `more` exceeds the positions."""
    if length + more > (limit := config.max_position_embeddings):
        raise ValueError(
            f"{name} has {length} tokens; with {more} more it exceeds the model's {limit} "
            f"positions. Shorten it, or take a model with a greater max_position_embeddings."
        )


def check_tokens(tokens: Tensor | list[int], config: LlamaConfig) -> None:
    """Raise ValueError if a token is outside the vocabulary.

    A split embedding would return zeros for such a token. A list may have numbers beyond int64.
    """
    if isinstance(tokens, Tensor):
        wrong = tokens[(tokens < 0) | (tokens >= config.vocab_size)].tolist()
    else:
        wrong = [token for token in tokens if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"token {wrong[0]} was given; the vocabulary has 0..{config.vocab_size - 1}."
        )
