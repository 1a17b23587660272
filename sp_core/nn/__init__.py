"""Transformer layers, rotary embedding, dropout, losses and gradients for models split over ranks.

This package exports no names. Import from the modules:

    layers      blocks, attention and norms for split sequences, with all weights on every rank
    block       LLaMA's block, with weights split over ranks
    memory      chunks, recomputation and offloading of activations
    parallel    linear layers whose weights are split over ranks
    replicated  the base class of `layers`: sums the gradients of weights over the ranks
    rope        rotary position embedding, from global positions
    dropout     dropout with the same pattern for any number of ranks
    loss        labels and cross-entropy for split sequences and vocabularies
    gradients   which rank holds which part of a weight; sums and norms of gradients
"""
