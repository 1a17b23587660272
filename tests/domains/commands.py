"""Declare the domain of commands: `sp-core generate` and `logits` on ranks, `plan` on one."""

import io
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from llama_cases import Case

from domains import decoding
from domains.config import SAMPLING
from domains.declared import Call, Parts, Subject, Values, judged, spans, values
from domains.folders import written
from domains.models import DTYPES, SCHEMES, SMALL, architecture, case_of
from domains.situations import folder_of
from sp_core.__main__ import main
from sp_core.link import link_of
from sp_core.llama import Sampling, byte_tokenizer
from sp_core.projection import Problem, project
from sp_core.testing import device

REFUSED = 2


def words(options: Values) -> list[str]:
    """Return options as a command line. None and False are left out; a list repeats its option."""
    found: list[str] = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            found += (
                []
                if item is None or item is False
                else [name]
                if item is True
                else [name, str(item)]
            )
    return found


def printed(command: str, comm: Any, **options: Any) -> str:
    """Run a command. Return what rank 0 prints; other ranks return an empty text.

    `comm` is None for a command that runs on one rank.

    Raises:
        ValueError: the command refuses its options.
    """
    out, errors = io.StringIO(), io.StringIO()
    shown = comm is None or comm.rank == 0  # ranks may be threads, which share standard output
    with (
        redirect_stdout(out) if shown else nullcontext(),
        redirect_stderr(errors) if shown else nullcontext(),
    ):
        code = main([command, *words(options)], comm)
    if code == REFUSED:
        raise ValueError(errors.getvalue())
    assert code == 0
    return out.getvalue()


TEXTS = {
    "letters": "def f(",
    "one letter": "a",
    "other scripts": "f\u00fcr \u4e16\U0001f469",
    "long": "0123456789" * 4,
    "spaces and lines": " \n\t x\n",
}
CHAT = "<user>{}</user>"
FEW = {aspect: dict([*parts.items()][:1]) for aspect, parts in SMALL.items()}
INFERENCE: dict[str, Parts] = {
    **architecture("--model", FEW | {"vocab": values(256), "tied": values(False, True)}),
    "--model.stops": {
        "none": lambda c, v: (),
        "some": lambda c, v: tuple(c.sample(range(256), 40)),
    },
    "--model.dtype": values(*DTYPES[:2]),
    "--prompt.count": spans((1, 1), (2, 3), (5, 6)),
    "--prompt.text": values(*TEXTS),
    "--prompt-file": values("none", "the last", "all"),
    "--chat": values(False, True),
    "--scheme": values(*SCHEMES),
    "--tp-sp": values(False, True),
    "--algorithm": values(None, "ring", "all_reduce=ring,all_gather=bruck", "auto"),
    "--dtype": values(None, *DTYPES[:2]),
    "--device": values("cpu", "cuda") if device().type == "cuda" else values("cpu"),
    "(ranks)": values(
        "--ring 2 --ulysses 2",
        "",
        "--tp 2",
        "--pp 2",
        "--ring 2 --tp 2",
        "--pp 2 --tp 2",
        "--ulysses 3",
    ),
}

STARTED = "of ranks that are started: test_inference.py"
BY_RANKS = dict.fromkeys(("--dp", "--pp", "--ring", "--ulysses", "--tp"), "by (ranks)")
BY_RANKS |= dict.fromkeys(("--timeout", "--input", "--refused"), STARTED)

FOLDER_STOPS = {"no file": None, "none": [], "a text": ["e"], "a list": [*"aeiou0123 "]}


def axes_of(drawn: Values) -> dict[str, int]:
    """Return the options that say how many ranks each axis has, with their values."""
    given = drawn["(ranks)"].split()
    return {axis: int(length) for axis, length in zip(given[::2], given[1::2], strict=True)}


def ranks(drawn: Values) -> int:
    """Return how many ranks run the command."""
    return math.prod(axes_of(drawn).values())


@contextmanager
def inferred(name: str, comm: Any, drawn: Values) -> Iterator[Call]:
    """Yield the call of a command on ranks that already run, with a folder that one rank writes."""
    case, stops = case_of(drawn), FOLDER_STOPS[drawn.get("--model.stop_strings", "no file")]
    text = TEXTS[drawn["--prompt.text"]]
    prompts = [text[number % len(text) :] for number in range(drawn["--prompt.count"])]
    first = {"none": len(prompts), "the last": -1, "all": 0}[drawn["--prompt-file"]]
    with folder_of(comm) as folder:
        files = {folder / f"{n}.txt": prompt for n, prompt in enumerate(prompts[first:])}
        if comm.rank == 0:
            for file, prompt in files.items():
                file.write_text(prompt, encoding="utf-8")
            written(
                case,
                folder,
                {"folder.dtypes": "one", "folder.more": "nothing", "folder.files": "two"},
            )
            byte_tokenizer().save(str(folder / "tokenizer.json"))
            if stops is not None:
                told = {"stop_strings": stops[0] if len(stops) == 1 else stops}
                (folder / "generation_config.json").write_text(json.dumps(told))
            (folder / "chat_template.jinja").write_text(CHAT.format("{{ messages[0].content }}"))
        comm.Barrier()
        own = {
            option: value
            for option, value in drawn.items()
            if option.startswith("--") and "." not in option
        }
        given = {"--model": str(folder), **axes_of(drawn), **own}
        given |= {"--prompt": prompts[:first], "--prompt-file": list(map(str, files))}
        judge = partial(judge_generate, stops) if name == "generate" else judge_logits
        whole = [CHAT.format(prompt) if drawn["--chat"] else prompt for prompt in prompts]
        yield Call(
            partial(printed, name, comm),
            given,
            partial(judge, case, given, whole) if comm.rank == 0 else lambda _: None,
        )


def judge_generate(
    stops: list[str] | None, case: Case, given: Values, prompts: list[str], text: str
) -> None:
    """Compare a printed text with that of the tokens that follow from the reference's logits."""
    chosen = {name: given[f"--{name.replace('_', '-')}"] for name in SAMPLING}
    sampling = Sampling(**{name: value for name, value in chosen.items() if value is not None})
    tokens = [
        decoding.continued(
            case,
            *(list(prompt.encode()), number, given["--max-tokens"], sampling, case.stops),
            [*given["--stop"], *(stops or [])],
        )
        for number, prompt in enumerate(prompts)
    ]
    texts = [bytes(found).decode(errors="replace") for found in tokens]
    wanted = (
        texts if len(texts) == 1 else [f"[{number}] {found}" for number, found in enumerate(texts)]
    )
    assert text == "".join(f"{line}\n" for line in wanted)


def judge_logits(case: Case, given: Values, texts: list[str], text: str) -> None:
    """Check that the likeliest tokens are printed, with their log-probabilities in order."""
    prompts = [list(prompt.encode()) for prompt in texts]
    wanted = decoding.last_logits("llama command", case, prompts, given["--dtype"] or "")
    rows, allowed = wanted.values["logits"].log_softmax(-1), wanted.allowed("logits")
    parts = re.split(r"^\[(\d+)\]\n", text, flags=re.MULTILINE)[1:]
    assert parts[::2] == [str(number) for number in range(len(rows))]
    for row, bound, lines in zip(rows, allowed, parts[1::2], strict=True):
        shown = [line.split(maxsplit=2) for line in lines.splitlines()]
        tokens, logs = (
            [int(token) for token, *_ in shown],
            torch.tensor([float(value) for _, value, _ in shown]),
        )
        assert len(tokens) == len(set(tokens)) == min(given["--top"] or 5, 256)
        assert [quoted for *_, quoted in shown] == [
            repr(bytes([token]).decode(errors="replace")) for token in tokens
        ]
        slack = 2 * float(bound.max()) + 5.1e-5  # four decimals are shown
        assert (logs - row[tokens]).abs().max() <= slack
        assert logs.tolist() == sorted(logs.tolist(), reverse=True)
        assert row.sort(descending=True).values[: len(tokens)].sub(logs).abs().max() <= slack


def length(chance: Random, drawn: Values, *, most: int) -> int:
    """Return a length that twice the number of ranks divides."""
    return 2 * int(drawn["--ranks"]) * chance.randint(1, most)


def judge_plan(given: Values, text: str) -> None:
    """Compare each printed line with its projection; the waiting share only if flops are given."""
    assert ("Assumed" in text) == (given["--flops"] is None)
    _, *lines, speed, known = (line for line in text.splitlines() if "Assumed" not in line)
    assert "error of these times is not known" in known
    heads, itemsize = given["--heads"], 4 if given["--dtype"] == "float32" else 2
    kv_heads, head_dim = given["--kv-heads"] or heads, given["--head-dim"] or 128
    sizes = (given["--seq"], given["--batch"] or 1, heads, kv_heads, head_dim, itemsize)
    place = (given["--ranks"], given["--ranks-per-node"] or 1)
    node, network = (link_of(given[name]) for name in ("--node-link", "--link"))
    flops = float(re.findall(r"(\S+) operations/s", speed)[0])
    assert given["--flops"] in (None, pytest.approx(flops, rel=1e-3))
    wanted = {
        (one.scheme, one.ring, one.ulysses): one
        for one in project(Problem(*sizes, *place, node, network, flops))
    }
    rows = [line.split() for line in lines]
    shown = {(scheme, int(ring), int(ulysses)) for scheme, ring, _, ulysses, *_ in rows}
    assert len(shown) == len(rows) == min(given["--show"] or 10, len(wanted))
    assert rows == sorted(rows, key=lambda row: float(row[4]))
    for scheme, ring, _, ulysses, ms, waiting, sent, messages in rows:
        one = wanted[scheme, int(ring), int(ulysses)]
        total = one.forward + one.backward
        assert (sent, int(messages)) == (f"{total.bytes_sent / 1e6:.1f}", total.messages)
        assert float(ms) == pytest.approx(1e3 * one.seconds, rel=1e-3, abs=0.01)
        if given["--flops"]:
            assert waiting == f"{max(one.exposed, 0.0) / one.seconds:.0%}"


SUBJECTS = [
    Subject(
        "sp-core generate",
        INFERENCE
        | {"(ranks)": {**INFERENCE["(ranks)"], **values("--dp 2 --tp 2", "--dp 3")}}
        | {
            "--max-tokens": values(3, 0, 1, 9),
            "--temperature": values(0.0, 1.5, None),
            "--top-k": values(None, 1, 7),
            "--top-p": values(None, 0.5, 1.0),
            "--seed": values(0, 5, 10**18, None),
            "--stop": {
                "none": lambda c, v: [],
                "one": lambda c, v: [chr(c.randint(1, 126))],
                "many": lambda c, v: [chr(code) for code in c.sample(range(32, 127), 50)],
            },
            "--model.stop_strings": values(*FOLDER_STOPS),
        },
        partial(inferred, "generate"),
        ranks,
        outside=BY_RANKS,
    ),
    Subject(
        "sp-core logits",
        INFERENCE | {"--top": values(None, 1, 300), "--model.dtype": values(*DTYPES)},
        partial(inferred, "logits"),
        ranks,
        outside=BY_RANKS,
    ),
    judged(
        "sp-core plan",
        partial(printed, "plan", None),
        {
            "--ranks": spans((2, 4), (1, 1), (5, 9), (100, 128), (1000, 1024)),
            "--seq": {"short": partial(length, most=9), "long": partial(length, most=5000)},
            "--kv-heads": {**values(None), **spans((1, 1), (2, 3), (4, 9))},
            "--heads": {
                "as many": lambda c, v: v["--kv-heads"] or 4,
                "more": lambda c, v: (v["--kv-heads"] or 1) * c.randint(2, 16),
            },
            "--head-dim": {**values(None), **spans((1, 1), (2, 256))},
            "--batch": {**values(None), **spans((2, 9))},
            "--dtype": values(None, "float32", "float16"),
            "--link": {
                "25gbit,10us": lambda c, v: "25gbit,10us",
                "of no time": lambda c, v: "999999999gb,0s",
                "slow": lambda c, v: "1.5MB/s,20ms",
                "other units": lambda c, v: "800Mbit,300NS",
            },
            "--node-link": {
                "as the link": lambda c, v: v["--link"],
                "fast": lambda c, v: "200GB,1us",
                "slower": lambda c, v: "1Mb,1s",
            },
            "--ranks-per-node": {**values(None), **spans((2, 8), (5000, 5000))},
            "--flops": values(1e12, 1e3, 1e18, None),
            "--show": {**values(None), **spans((1, 3), (99, 99))},
        },
        judge_plan,
    ),
]
