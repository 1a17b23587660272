"""The ways to split attention over ranks, all with one signature."""

from sp_core.schemes.allgather_kv import allgather_kv_attention

__all__ = ["allgather_kv_attention"]
