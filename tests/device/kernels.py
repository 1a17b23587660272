"""List which kernel torch uses for which attention: `python -m device.kernels --on cuda`.

Each case runs forward and backward, with and without a gradient of the log-sum-exp. Its results are
compared with the reference. The exit code is 1 if a result is wrong, or if the plain kernel ran
without a known reason.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from oracle.attention_check import check_attention
from oracle.dispatched import Calls
from oracle.strategies import DTYPES, AttentionProblem

import sp_core as sp
from sp_core.attention import cuda, kernels
from sp_core.schemes import SCHEMES
from sp_core.testing import run_threads

LENGTH = 96
CASES: dict[str, dict[str, Any]] = {
    "full": {"mask": sp.Mask()},
    "causal": {"mask": sp.Mask(causal=True)},
    "window": {"mask": sp.Mask(causal=True, window=20)},
    "documents": {"mask": sp.Mask(causal=True, documents=(0, 20, 44, 60, 83, LENGTH))},
    "sinks": {"mask": sp.Mask(causal=True), "sinks": 1.0},
    "softcap": {"mask": sp.Mask(causal=True), "softcap": 5.0},
    "alibi": {"mask": sp.Mask(causal=True), "alibi": 0.5},
}
HEAD_DIMS = (64, 128, 100, 33, 256, 264)
LAYOUTS = ("plain", "padded")
LSE = ("", "lse")
""""lse" for cases in which the log-sum-exp gets a gradient, too."""


def fused(calls: Calls) -> set[str]:
    """Return the fused attention kernels among the calls of a mode.

    They are "flash", "cudnn" and "efficient". The flash kernel for packed sequences is
    "flash (sequences)".
    """
    names = {name.removeprefix("aten::_") for name, *_ in calls.made if "attention" in name}
    return {
        next(kind for kind in ("flash", "cudnn", "efficient") if kind in name)
        + " (sequences)" * name.startswith("flash_attention")
        for name in names
    }


def why_plain(problem: AttentionProblem, device: str) -> str:
    """Return the reason why no fused kernel can compute a problem on a device, or ""."""
    if problem.softcap is not None:
        return "the scores are bounded"
    if problem.alibi is not None:
        return "the scores are biased by position"
    if problem.dtype == "float64":
        return "no fused kernel takes float64"
    if problem.dtype == "bfloat16" and cuda.capability(torch.device(device)) < (8, 0):
        return "the GPU has no kernel for bfloat16"
    nbytes = problem.head_dim * problem.torch_dtype.itemsize
    return f"rows of {nbytes} bytes, no multiple of 16" if nbytes % 16 else ""


def tried(problem: AttentionProblem, device: str) -> tuple[set[str], str]:
    """Run a problem on one rank. Return the names of the kernels, and the error or ""."""
    calls, names = Calls(), set[str]()

    def noted(plain: Callable[..., Any], *given: Any) -> Any:
        names.add("plain")
        return plain(*given)

    def body(comm: Any) -> None:
        with sp.Mesh(comm, device=device, transport="staged", sp=1) as mesh, calls:
            scheme = partial(SCHEMES["ring"], comm=mesh["sp"])
            check_attention("ring", scheme, problem, mesh["sp"])

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_plain", "_plain_backward"):
                patch.setattr(kernels, name, partial(noted, getattr(kernels, name)))
            run_threads(1, body)
            return names | fused(calls), ""
    except Exception as error:  # noqa: BLE001 - any error becomes a row of the table
        lines = [line for line in str(error).splitlines() if line.strip()]
        return set(), (lines or [type(error).__name__])[-1].strip()


def rows(device: str, quick: bool) -> Iterator[tuple[str, ...]]:
    """Yield dtype, head dim, case, layout, gradient of the lse, kernels, reason or problem."""
    dims, layouts = (HEAD_DIMS[:2], LAYOUTS[:1]) if quick else (HEAD_DIMS, LAYOUTS)
    for dtype, head_dim, case, layout, lse in product(DTYPES, dims, CASES, layouts, LSE):
        sizes = {"batch": 2, "seq_len": LENGTH, "kv_len": LENGTH, "kv_heads": 2, "group": 2}
        problem = AttentionProblem(
            **{**sizes, "head_dim": head_dim, "dtype": dtype, "storage": layout},
            layout="contiguous",
            kv_layout="contiguous",
            softmax_scale=None,
            magnitude=1.0,
            values="normal",
            upstream="normal",
            needs_grad=(True, True, True),
            seed=3 if lse else 1,
            **CASES[case],
        )
        names, wrong = tried(problem, device)
        why = why_plain(problem, device) or "WRONG: no known reason" if "plain" in names else ""
        said = f"WRONG: {wrong}" if wrong else why
        yield dtype, str(head_dim), case, layout, lse, ", ".join(sorted(names)), said


def main(words: Sequence[str]) -> int:
    """Print the table as Markdown; return the exit code."""
    parser = argparse.ArgumentParser("python -m device.kernels", description=__doc__)
    parser.add_argument("--on", default="late", help="the kind of device (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two head dims, one layout")
    options = parser.parse_args(words)
    if options.on == "late":
        from device.plugin import NAME  # makes torch know it

        assert options.on == NAME
    count = 0
    print("| dtype | head dim | case | layout | gradient of lse | kernels | |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows(options.on, options.quick):
        print(f"| {' | '.join(row)} |", flush=True)
        count += "WRONG" in row[-1]
    print(f"\n{count} wrong, on {options.on}, torch {torch.__version__}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
