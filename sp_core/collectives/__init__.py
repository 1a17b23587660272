"""Collectives over a transport: `maps` carries them out, `build` checks the arguments. `sp_core.autograd` makes them differentiable."""
