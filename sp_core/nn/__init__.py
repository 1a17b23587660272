"""The parts of Transformers over ranks: layers, rotary embedding, dropout, losses and gradients.

Import them from their modules.

`layers` have weights that all ranks of a group hold alike; `parallel` splits the weights over the
ranks.
"""
