"""Collectives over a transport.

`api` holds what programs call, `differentiable` its backward, `build` checks arguments and makes a
map, `maps` brings tensors into flat buffers, `execution` carries it out, `plans` prepares a
collective for many runs.
"""
