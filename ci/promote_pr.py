"""Let a reviewed pull request run on the GPU runners: push it to `pull-request/N`.

    python -m ci.promote_pr 123 0123456789abcdef0123456789abcdef01234567 [--dry-run]

The commit is the one that you reviewed, in full: what is pushed is that commit or nothing. Nothing
of the pull request is checked out or run here, but all of it runs on the GPU runner, its tests too:
your review is the guard. A change of how CI runs is refused because it is easily overlooked. Needs
git and the right to push. Exit code: 0 pushed or nothing to do, 1 refused, 2 wrong arguments or git
failed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from ci.git import GitFailed, say

GUARDED = (
    ".github/*",
    ".ci/*",
    "ci/*",
    "*constraints*.txt",
    "*requirements*.txt",
    "*.lock",
    "*conftest.py",
    "*sitecustomize.py",
    "*usercustomize.py",
)
"""Patterns of files that decide how code runs in CI, and with which packages.

Files at the root, such as noxfile.py and pyproject.toml, decide it too, except Markdown.
"""

SHOWN = 20


class Refused(Exception):
    """The pull request must not be pushed; the text says why and what to do."""


def fetch(remote: str, ref: str) -> str:
    """Fetch the commit that a ref of the remote names, and return its hash; move no local ref."""
    say("fetch", "--quiet", "--no-tags", "--no-recurse-submodules", remote, ref)
    return say("rev-parse", "--verify", "FETCH_HEAD^{commit}")


def changed_files(base: str, head: str) -> list[str]:
    """Return the paths that head changed since it left base, whatever git's settings are."""
    left = say("merge-base", "--all", base, head).split()
    return sorted(
        {
            name
            for commit in left
            for name in say("diff-tree", "-r", "-z", "--name-only", commit, head).split("\0")
            if name
        }
    )


def guarded(paths: Sequence[str]) -> Iterator[str]:
    """Yield those of the paths that decide how CI runs."""
    for path in paths:
        at_root = "/" not in path and not path.endswith(".md")
        if at_root or any(fnmatch(path, rule) for rule in GUARDED):
            yield path


def listed(names: Sequence[str]) -> str:
    """List names, one a line, as JSON strings, so that no name can send codes to the terminal."""
    rest = [f"  ... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return "\n".join([*(f"  {json.dumps(name)}" for name in names[:SHOWN]), *rest])


def check(number: int, reviewed: str, remote: str, base: str, *, allow_ci: bool) -> None:
    """Refuse a pull request that moved since its review, or that changes what it may not."""
    head = fetch(remote, f"refs/pull/{number}/head")
    if head != reviewed:
        raise Refused(
            f"pull request {number} moved: you reviewed {reviewed}, it is now {head}. "
            "Review it again, then pass that commit."
        )
    changed = changed_files(fetch(remote, f"refs/heads/{base}"), head)
    print(
        f"pull request {number} at {head} changes {len(changed)} files against {base}:\n"
        f"{listed(changed)}"
    )
    forbidden = list(guarded(changed))
    if forbidden and not allow_ci:
        raise Refused(
            f"it changes how CI runs or what it installs:\n{listed(forbidden)}\n"
            "Review these line by line; if they are wanted, pass --allow-ci, "
            "or merge them by themselves first."
        )


def push(number: int, reviewed: str, remote: str, *, dry_run: bool) -> str:
    """Push the reviewed commit to `pull-request/N`, and return text that says what was done."""
    branch = f"refs/heads/pull-request/{number}"
    there = say("ls-remote", remote, branch).partition("\t")[0]
    if there == reviewed:
        return f"pull-request/{number} is at {reviewed} already: nothing to do"
    if dry_run:
        before = f"now {there}" if there else "a new branch"
        return f"dry run: would push {reviewed} to pull-request/{number} ({before})"
    say("push", "--quiet", f"--force-with-lease={branch}:{there}", remote, f"{reviewed}:{branch}")
    return f"pushed {reviewed} to pull-request/{number}: the GPU workflow runs on it"


def full_sha(text: str) -> str:
    """Accept the full hash of a commit only. A short one can be forged."""
    if not re.fullmatch("[0-9a-f]{40}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no full commit: 40 lower-case hexadecimal digits, "
            "as `git rev-parse` prints them"
        )
    return text


def pull_request(text: str) -> int:
    """Accept the number of a pull request."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of a pull request")
    return int(text)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("number", type=pull_request, help="of the pull request")
    parser.add_argument(
        "reviewed", type=full_sha, metavar="commit", help="that you reviewed, all 40 digits"
    )
    parser.add_argument(
        "--remote",
        default="origin",
        help="where pull requests live and the branch goes (default: origin)",
    )
    parser.add_argument(
        "--base", default="main", help="the branch that it is to be merged into (default: main)"
    )
    parser.add_argument(
        "--allow-ci",
        action="store_true",
        help="it may change how CI runs, and which packages are installed",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, push nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Promote a pull request. Return the exit code."""
    chosen = parse(arguments)
    try:
        check(chosen.number, chosen.reviewed, chosen.remote, chosen.base, allow_ci=chosen.allow_ci)
        print(push(chosen.number, chosen.reviewed, chosen.remote, dry_run=chosen.dry_run))
    except Refused as refusal:
        print(f"promote_pr: refused: {refusal}", file=sys.stderr)
        return 1
    except GitFailed as failure:
        print(f"promote_pr: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
