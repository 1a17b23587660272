"""The schemes by name."""

from sp_core.schemes.allgather_kv import allgather_kv_attention
from sp_core.schemes.ring import ring_attention
from sp_core.schemes.ulysses import ulysses_attention

SCHEMES = {
    "allgather_kv": allgather_kv_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}
"""The schemes over one communicator."""
