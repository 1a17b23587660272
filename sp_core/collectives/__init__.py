"""Collectives over a transport.

`build` checks their arguments and makes a map, `maps` brings tensors into flat buffers, `choice` takes an algorithm, `execution`
carries out its schedule (or the MPI library does it), `plans` prepares one for many runs; `sp_core.autograd` differentiates them.
"""
