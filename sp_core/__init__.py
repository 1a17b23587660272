"""Run Transformers in sequence and tensor parallel over MPI. Importing this does not start MPI.

Tokens are owned (`Sharding`), bytes move (`Mesh`, `all_gather`, ...), attention is computed
(`allgather_kv_attention`, `local_attention`), layers are built of these (`TransformerBlock`);
`sp_core.testing` proves them.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
