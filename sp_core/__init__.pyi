# The public names of sp_core. Type checkers and the import read them here; a module is loaded when a name of it is first used.
from .attention import (
    local_attention as local_attention,
)
from .attention import (
    merge as merge,
)
from .collectives.api import (
    all_gather as all_gather,
)
from .collectives.api import (
    all_gather_start as all_gather_start,
)
from .collectives.api import (
    all_reduce as all_reduce,
)
from .collectives.api import (
    all_reduce_start as all_reduce_start,
)
from .collectives.api import (
    all_to_all as all_to_all,
)
from .collectives.api import (
    all_to_all_start as all_to_all_start,
)
from .collectives.api import (
    broadcast as broadcast,
)
from .collectives.api import (
    broadcast_start as broadcast_start,
)
from .collectives.api import (
    reduce as reduce,
)
from .collectives.api import (
    reduce_scatter as reduce_scatter,
)
from .collectives.api import (
    reduce_scatter_start as reduce_scatter_start,
)
from .collectives.api import (
    shift as shift,
)
from .collectives.api import (
    shift_start as shift_start,
)
from .collectives.differentiable import (
    Pending as Pending,
)
from .collectives.differentiable import (
    copy_all_to_group as copy_all_to_group,
)
from .collectives.differentiable import (
    copy_to_group as copy_to_group,
)
from .collectives.differentiable import (
    gather_replicated as gather_replicated,
)
from .collectives.differentiable import (
    reduce_from_group as reduce_from_group,
)
from .collectives.plans import (
    Plan as Plan,
)
from .collectives.plans import (
    all_reduce_ as all_reduce_,
)
from .collectives.plans import (
    plan as plan,
)
from .communicator import (
    Communicator as Communicator,
)
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    CollectiveMismatch as CollectiveMismatch,
)
from .errors import (
    DeviceError as DeviceError,
)
from .errors import (
    DtypeError as DtypeError,
)
from .errors import (
    PeerFailed as PeerFailed,
)
from .errors import (
    RankError as RankError,
)
from .errors import (
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
)
from .nn.layers import (
    LayerNorm as LayerNorm,
)
from .nn.layers import (
    RMSNorm as RMSNorm,
)
from .nn.layers import (
    SelfAttention as SelfAttention,
)
from .nn.layers import (
    TransformerBlock as TransformerBlock,
)
from .nn.parallel import (
    ColumnParallelLinear as ColumnParallelLinear,
)
from .nn.parallel import (
    RowParallelLinear as RowParallelLinear,
)
from .nn.rope import (
    Rope as Rope,
)
from .schemes import (
    allgather_kv_attention as allgather_kv_attention,
)
from .schemes import (
    hybrid_attention as hybrid_attention,
)
from .schemes import (
    ring_attention as ring_attention,
)
from .schemes import (
    ulysses_attention as ulysses_attention,
)
from .sharding import (
    Sharding as Sharding,
)
from .shared_tensors import (
    fence as fence,
)
from .shared_tensors import (
    peer as peer,
)
from .shared_tensors import (
    shared_empty as shared_empty,
)

__version__: str
