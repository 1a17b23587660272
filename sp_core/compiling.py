"""Keep `torch.compile` out of functions that communicate: it cannot trace MPI calls."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eager(function: Function) -> Function:
    """Let `torch.compile` run a function, and all that it calls, without tracing them.

    `torch.compiler.disable` does the same, but it imports the compiler, which takes a second. The
    names used here are private to torch. Without them `torch.compile` fails as if nothing was done.
    """
    inner = inspect.unwrap(function)
    inner.__dict__["_torchdynamo_disable"] = True
    inner.__dict__["_torchdynamo_disable_msg"] = "torch.compile cannot trace MPI calls"
    with suppress(AttributeError, TypeError):
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(inner.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class EagerFunction(torch.autograd.Function):
    """An autograd function whose forward and backward `torch.compile` does not trace."""

    def __init_subclass__(cls) -> None:
        """Mark the functions of a subclass."""
        for function in (cls.forward, cls.backward):
            eager(function)
