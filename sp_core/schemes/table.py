"""Map the names of the schemes to their functions."""

from sp_core.schemes.allgather_kv import allgather_kv_attention
from sp_core.schemes.ring import ring_attention
from sp_core.schemes.ulysses import ulysses_attention

SCHEMES = {
    "allgather_kv": allgather_kv_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
}
"""Name -> attention function, for the schemes that need a single communicator."""
