"""Split attention over ranks: AllGather-KV, ring, Ulysses and hybrid.

Each scheme is one function of (q, k, v, *, comm, sharding, ...) that returns the same result as
attention on a single device. `SCHEMES` maps names to these functions; `hybrid_attention`, which
also needs a mesh, is not in it. A submodule is imported when one of its names is first used. The
tensor-parallel linear layers are in `tp_sp`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
