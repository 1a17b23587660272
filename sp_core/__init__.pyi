# The public names of sp_core, read by type checkers and by the import. A module is loaded when a
# name of it is first used.
from . import (
    llama as llama,
)
from .attention import (
    local_attention as local_attention,
    merge as merge,
)
from .collectives.api import (
    all_gather as all_gather,
    all_gather_start as all_gather_start,
    all_reduce as all_reduce,
    all_reduce_start as all_reduce_start,
    all_to_all as all_to_all,
    all_to_all_start as all_to_all_start,
    broadcast as broadcast,
    broadcast_start as broadcast_start,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_start as reduce_scatter_start,
    shift as shift,
    shift_start as shift_start,
)
from .collectives.differentiable import (
    Pending as Pending,
    copy_all_to_group as copy_all_to_group,
    copy_to_group as copy_to_group,
    gather_replicated as gather_replicated,
    reduce_from_group as reduce_from_group,
)
from .collectives.plans import (
    Plan as Plan,
    all_reduce_ as all_reduce_,
    plan as plan,
)
from .communicator import (
    Communicator as Communicator,
)
from .errors import (
    CheckpointError as CheckpointError,
    CollectiveMismatch as CollectiveMismatch,
    DeviceError as DeviceError,
    DtypeError as DtypeError,
    PeerFailed as PeerFailed,
    RankError as RankError,
    ShapeError as ShapeError,
)
from .mask import (
    Mask as Mask,
)
from .mesh import (
    Mesh as Mesh,
)
from .nn.dropout import (
    dropout as dropout,
)
from .nn.layers import (
    FeedForward as FeedForward,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
    SelfAttention as SelfAttention,
    TransformerBlock as TransformerBlock,
)
from .nn.parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from .nn.rope import (
    Rope as Rope,
)
from .schemes import (
    allgather_kv_attention as allgather_kv_attention,
    hybrid_attention as hybrid_attention,
    ring_attention as ring_attention,
    ulysses_attention as ulysses_attention,
)
from .sharding import (
    Sharding as Sharding,
)
from .shared_tensors import (
    fence as fence,
    peer as peer,
    shared_empty as shared_empty,
)

__version__: str
