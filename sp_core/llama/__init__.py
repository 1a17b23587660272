"""LLaMA over MPI: inference and training with weights, layers and sequences split over ranks.

`load` reads a model folder in Hugging Face's format, `save` writes one, and `create` makes a model
with random weights; `Llama` is the model. `Grid` names the groups of ranks that a model uses.
`generate` continues prompts with `Decoder`, which appends tokens to sequences and keeps keys and
values split over the ranks. `prefill_unequal` computes logits of sequences of unequal length.
`train` has training steps and their checkpoints, `pipeline` training over pipeline stages. Reading
and writing folders needs `safetensors`.
"""

from sp_core.llama import pipeline as pipeline, train as train
from sp_core.llama.checkpoint import Checkpoint, load, save
from sp_core.llama.config import LlamaConfig
from sp_core.llama.decode import Decoder
from sp_core.llama.generate import Sampling, generate
from sp_core.llama.grid import Grid
from sp_core.llama.model import Llama, create
from sp_core.llama.text import byte_tokenizer
from sp_core.llama.unequal import prefill_unequal

__all__ = [
    "Checkpoint",
    "Decoder",
    "Grid",
    "Llama",
    "LlamaConfig",
    "Sampling",
    "byte_tokenizer",
    "create",
    "generate",
    "load",
    "prefill_unequal",
    "save",
]
