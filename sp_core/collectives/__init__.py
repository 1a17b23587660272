"""Collectives over a transport: `maps` carries them out, `build` checks their arguments, `sp_core.autograd` differentiates."""
