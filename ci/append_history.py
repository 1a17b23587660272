"""Append the benchmark records of one commit to a branch that holds nothing else.

    python -m ci.append_history COMMIT RECORDS.jsonl... [--dry-run]

The records come out of another job, so they are not trusted: a line that is no record, or a record
of a different commit, is reported and left out, and the exit code is 1. It is 2 if git failed. A
line of the branch that is no record is reported and kept.
Records that the branch has already are not added again. The branch has one file a month, as servers
refuse large ones. With GITHUB_TOKEN and GITHUB_SERVER_URL set, that token pushes.
"""

import base64
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks import records
from benchmarks.launching import about, parse
from benchmarks.records import Record
from ci.git import GitFailed, git, say

BRANCH = "bench-history"
AUTHOR = {"user.name": "bench-history", "user.email": "bench-history@localhost"}


def of_commit(paths: Iterable[Path], commit: str) -> tuple[list[Record], list[str]]:
    """Return the records of one commit in files, and the complaints about other lines."""
    found, problems = [], []
    for path in paths:
        reading = records.read(path)
        problems += reading.problems
        for record in reading.records:
            complaint = foreign(record, commit)
            if complaint:
                problems.append(f"{path}: {record.case.id}: {complaint}")
            else:
                found.append(record)
    return found, problems


def foreign(record: Record, commit: str) -> str | None:
    """Return why a record does not belong to a commit's history, or None if it does."""
    if record.commit.sha != commit:
        return f"measured at {record.commit.sha}, not at {commit}"
    if record.commit.dirty is not False:
        return "measured with changes that are not in the commit"
    if record.pair is not None:
        return "half of a comparison, not a run"
    if not re.match(r"20\d\d(0[1-9]|1[0-2])\d\dT", record.run_id):
        return f"the run's name {record.run_id} does not begin with its time"
    return None


def identity(record: Record) -> tuple[object, ...]:
    """Return values that together identify a record."""
    return record.run_id, record.launch, *record.key


def month(record: Record) -> str:
    """Return the name of a record's file. A run's id begins with its date."""
    return f"{record.run_id[:4]}-{record.run_id[4:6]}.jsonl"


def added(text: bytes, new: Iterable[Record], name: str) -> tuple[bytes, int]:
    """Append to a file's text the records that it lacks. Return the new text and their number.

    Lines of it that are no record, as of another version, are reported and kept.
    """
    reading = records.read_lines(text, f"{name} of the branch")
    for problem in reading.problems:
        print(f"append_history: {problem}; the line is kept", file=sys.stderr)
    there = {identity(record) for record in reading.records}
    text += b"\n" * (text[-1:] not in (b"", b"\n"))  # the last line may have been cut off
    missing = {identity(record): record for record in new if identity(record) not in there}
    lines = [msgspec.json.encode(record) + b"\n" for record in missing.values()]
    return text + b"".join(lines), len(lines)


def authorisation() -> dict[str, str]:
    """Return git's setting that sends a workflow's token to its own server; {} without a token."""
    token, server = os.environ.get("GITHUB_TOKEN"), os.environ.get("GITHUB_SERVER_URL")
    if not token or not server:
        return {}
    secret = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    return {f"http.{server}/.extraheader": f"AUTHORIZATION: basic {secret}"}


def tip(remote: str, access: Mapping[str, str]) -> str | None:
    """Return the last commit of the branch, or None if there is no branch yet."""
    ref = f"refs/heads/{BRANCH}"
    there = git("ls-remote", remote, ref, settings=access).decode().partition("\t")[0]
    if there:
        git("fetch", "--quiet", "--no-tags", remote, ref, settings=access)
    return there or None


def commit_of(parent: str | None, new: Sequence[Record], title: str) -> tuple[str | None, int]:
    """Return a commit on top of `parent` (None if no record is new), and how many records it adds.

    `parent` is the last commit of the branch, or None if there is no branch yet.
    """
    old = (
        dict(line.split("\t")[::-1] for line in say("ls-tree", parent).splitlines())
        if parent
        else {}
    )
    files = {name: entry.split()[2] for name, entry in old.items()}
    total = 0
    for name in sorted({month(record) for record in new}):
        text = git("cat-file", "blob", files[name]) if name in files else b""
        text, count = added(text, [record for record in new if month(record) == name], name)
        files[name] = git("hash-object", "-w", "--stdin", data=text).decode().strip()
        total += count
    if not total:
        return None, 0
    entries = "".join(f"100644 blob {blob}\t{name}\n" for name, blob in files.items())
    tree = git("mktree", data=entries.encode()).decode().strip()
    parents = ("-p", parent) if parent else ()
    return git("commit-tree", tree, *parents, "-m", title, settings=AUTHOR).decode().strip(), total


def append(
    new: Sequence[Record], title: str, remote: str, *, dry_run: bool, attempts: int = 3
) -> str:
    """Push records to the branch, on top of commits by other pushes. Return text on the result."""
    access = authorisation()
    made, count = commit_of(tip(remote, access), new, title)
    if made is None:
        return f"{BRANCH} has these {len(new)} records already"
    if dry_run:
        return f"dry run: would append {count} records to {BRANCH}"
    try:
        git("push", "--quiet", remote, f"{made}:refs/heads/{BRANCH}", settings=access)
    except GitFailed:
        if attempts == 1:
            raise
        return append(new, title, remote, dry_run=dry_run, attempts=attempts - 1)
    return f"appended {count} records to {BRANCH}"


OPTIONS = {
    "commit": about(help="that was measured, in full"),
    "files": about(type=Path, nargs="+", metavar="RECORDS.jsonl"),
    "--remote": about(
        default="origin", help=f"where the branch {BRANCH} is (default: %(default)s)"
    ),
    "--dry-run": about(action="store_true", help="check everything, push nothing"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Append records to the branch, and return the exit code.

    The code is 1 if a line was left out or no record is left, 2 if git failed, else 0.
    """
    chosen = parse("append_history", __doc__, OPTIONS, arguments)
    found, problems = of_commit(chosen.files, chosen.commit)
    for problem in problems:
        print(f"append_history: {problem}", file=sys.stderr)
    if not found:
        print("append_history: no record can be used; nothing was appended", file=sys.stderr)
        return 1
    try:
        print(append(found, f"Records of {chosen.commit}", chosen.remote, dry_run=chosen.dry_run))
    except GitFailed as failure:
        print(f"append_history: {failure}", file=sys.stderr)
        return 2
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
