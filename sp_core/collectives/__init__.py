"""Run collectives over a transport, with gradients.

Programs call the functions of `api`, `differentiable` and `plans`. A call goes through these
modules: `build` checks the arguments and makes a map, a collective with all sizes known (`maps`).
The map brings tensors into flat buffers. `execution` runs the collective, and `combining` makes the
sums. `differentiable` adds the backward. `plans` prepares a collective for many calls.
"""
