from .adjoint import check_adjoint as check_adjoint, global_map as global_map
from .checked import CheckedComm as CheckedComm
from .checked_group import CheckedGroup as CheckedGroup
from .engine import given as given, spmd as spmd
from .live_bytes import LiveBytes as LiveBytes
from .run import run_threads as run_threads
from .session import (
    device as device,
    event as event,
    features as features,
    note as note,
    record_ratio as record_ratio,
    target as target,
    tier as tier,
)
from .threads import ThreadComm as ThreadComm
from .tolerance import bound as bound, check_close as check_close
