from .allgather_kv import allgather_kv_attention as allgather_kv_attention
from .hybrid import hybrid_attention as hybrid_attention
from .ring import ring_attention as ring_attention
from .table import SCHEMES as SCHEMES
from .ulysses import ulysses_attention as ulysses_attention
