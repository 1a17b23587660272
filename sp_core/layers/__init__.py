"""Transformer layers over the tokens of one rank, with weights that all ranks of a group hold alike.

Every rank runs a layer on its own tokens, so the gradient that it computes for a weight is only its tokens' part. Each layer here
sums these parts over the ranks in its backward: after `loss.backward()` every rank holds the gradient of the sum of all losses, and
replicas stay equal. Shapes: B batch, S sequence, E model dim, F feed-forward dim, H heads, K key/value heads, D head dim, P ranks.
"""

from sp_core.layers.attention import Scheme, SelfAttention
from sp_core.layers.block import TransformerBlock
from sp_core.layers.feed_forward import FeedForward
from sp_core.layers.norms import LayerNorm, RMSNorm
from sp_core.layers.replicated import ReplicatedLayer

__all__ = ["FeedForward", "LayerNorm", "RMSNorm", "ReplicatedLayer", "Scheme", "SelfAttention", "TransformerBlock"]
