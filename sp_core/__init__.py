"""Run Transformers in sequence and tensor parallel over MPI.

Importing `sp_core` does not start MPI. The package offers, among others:

    Sharding                                 which rank holds which tokens of a sequence
    Mesh                                     named axes over the ranks, and their communicators
    all_gather, all_reduce, ...              differentiable collectives on tensors
    ring_attention, ulysses_attention, ...   attention over tokens that are split over ranks
    local_attention                          attention on one rank
    TransformerBlock, ...                    layers made of these
    sp_core.testing                          tools to test programs of several ranks
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
