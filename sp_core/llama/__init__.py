"""LLaMA over MPI.

A Hugging Face checkpoint whose weights are split over the ranks, for sequences that are split over
others.

`load` reads a model folder, `save` writes one, and `create` makes a model with random weights.
`Llama` is the model, `Decoder` makes sequences grow with a cache that is split along the sequence,
and `generate` chooses tokens. Files need `safetensors`.
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
