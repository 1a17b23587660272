"""Attention split over ranks: every scheme has the same signature."""

from sp_core.schemes.allgather_kv import allgather_kv_attention
from sp_core.schemes.hybrid import hybrid_attention
from sp_core.schemes.ring import ring_attention
from sp_core.schemes.ulysses import ulysses_attention

SCHEMES = {
    "allgather_kv": allgather_kv_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}
"""The schemes over one communicator, by name."""

__all__ = [
    "SCHEMES",
    "allgather_kv_attention",
    "hybrid_attention",
    "ring_attention",
    "ulysses_attention",
]
