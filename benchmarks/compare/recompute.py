"""Recompute every verdict of a comparison: `python -m benchmarks.compare.recompute FOLDER`.

For those who do not trust the comparison: this file uses the standard library only and shares no
code with what it checks. It reads `result.json` and `records.jsonl`, throws the coins again, takes
the medians of the samples again, applies the rule as it is written down below, and says where it
comes to something else. Exit code: 0 all agree, 1 something does not, 2 the files cannot be read.
"""

import hashlib
import json
import sys
from math import comb, exp, expm1, isclose, log, log1p
from pathlib import Path
from statistics import median
from typing import Any

PAIRS = {"screen": 10, "confirm": 20}
AGREE = {"screen": 8, "confirm": 16}
SHARE = {"screen": 0.8, "confirm": 1.0}
SMALLEST = {"cpu": 0.10, "cuda": 0.05}
GATEABLE_UP_TO = 0.15
MISS = 0.02
Json = dict[str, Any]
Launches = dict[tuple[str, int, str], Json]


def launches_of(
    records: list[Json], seed: int, complaints: list[str]
) -> dict[tuple[str, int], Launches]:
    """Return the records by case and ranks, then by place; complain about order and coins."""
    found: dict[tuple[str, int], Launches] = {}
    for record in records:
        name, pair = (record["case"]["id"], record["case"]["ranks"]), record["pair"]
        stage, index, side = place = (pair["stage"], pair["index"], pair["side"])
        if place in found.setdefault(name, {}):
            complaints.append(f"{name} has two records of {place}")
        found[name][place] = record
        other = (stage, index, "base" if side == "head" else "head")
        if (other in found[name]) != (pair["slot"] == 1):
            complaints.append(f"{name}: records of {place} do not come in the order of their slots")
        digest = hashlib.sha256(f"{seed}/{stage}/{name[1]}/{index}".encode()).digest()
        thrown = digest[0] % 2
        slot = thrown if side == "base" else 1 - thrown
        if (pair["seed"], pair["coin"], pair["slot"]) != (seed, thrown, slot):
            complaints.append(f"{name}: {pair} is not what the seed {seed} throws")
    return found


def seconds(record: Json) -> float:
    """The time of a launch, from its samples."""
    return float(median(record["timing"]["samples_s"]))


def ends(values: list[float]) -> tuple[float, float]:
    """Return the interval of the median: each end misses it with a probability of at most MISS."""
    values, count = sorted(values), len(values)
    out = 0
    while 2 * (out + 2) <= count and sum(comb(count, i) for i in range(out + 2)) / 2**count <= MISS:
        out += 1
    return values[out], values[count - 1 - out]


def direction(stage: str, values: list[float], delta: float) -> str:
    """What one stage says of log-ratios: slower, faster or nothing."""
    edge = log1p(SHARE[stage] * delta)
    if len([v for v in values if v > 0]) >= AGREE[stage] and median(values) >= edge:
        return "slower"
    faster = len([v for v in values if v < 0]) >= AGREE[stage] and median(values) <= -edge
    return "faster" if faster else "nothing"


def verdict(launches: Launches, in_base: bool, in_head: bool) -> tuple[str, float | None]:
    """Verdict and median ratio of one case."""
    if not (in_base and in_head):
        return ("new" if in_head else "missing"), None
    if (trouble := unusable(launches, ["screen"])) is not None:
        return trouble, None
    screen, delta = ratios(launches, "screen"), threshold(launches)
    transport = launches[("screen", 0, "base")]["transport"]
    if transport["oversubscribed"] or transport["shared_gpu"]:
        return "oversubscribed", exp(median(screen))
    if delta > GATEABLE_UP_TO:
        return "ungateable", exp(median(screen))
    first = direction("screen", screen, delta)
    if first == "nothing":
        return within(screen, delta), exp(median(screen))
    if (trouble := unusable(launches, ["screen", "confirm"])) is not None:
        return trouble, None
    confirm = ratios(launches, "confirm")
    if direction("confirm", confirm, delta) == first:
        return {"slower": "regressed", "faster": "improved"}[first], exp(median(confirm))
    return within(confirm, delta), exp(median(confirm))


def unusable(launches: Launches, stages: list[str]) -> str | None:
    """Why launches of some stages cannot be judged."""
    wanted = [
        (stage, index, side)
        for stage in stages
        for index in range(PAIRS[stage])
        for side in ("base", "head")
    ]
    found = [launches.get(place) for place in wanted]
    if any(
        r is None or r["status"] not in ("ok", "skew_limited") or seconds(r) <= 0 for r in found
    ):
        return "missing"
    records = [r for r in found if r is not None]
    same = [
        {
            json.dumps([r["env"]["fingerprint"], r["harness_sha"], r["case"]], sort_keys=True)
            for r in records
        }
    ]
    same += [
        {json.dumps(r["commit"], sort_keys=True) for r in records if r["pair"]["side"] == side}
        for side in ("base", "head")
    ]
    return "mismatch" if any(len(values) > 1 for values in same) else None


def ratios(launches: Launches, stage: str) -> list[float]:
    """log(head / base) of every pair of a stage."""
    pairs = [
        (launches[(stage, i, "head")], launches[(stage, i, "base")]) for i in range(PAIRS[stage])
    ]
    return [log(seconds(head) / seconds(base)) for head, base in pairs]


def threshold(launches: Launches) -> float:
    """The smallest change that counts: what base differs from itself, twice, or more."""
    times = [seconds(launches[("screen", i, "base")]) for i in range(PAIRS["screen"])]
    low, high = ends([log(times[i + 1] / times[i]) for i in range(len(times) - 1)])
    return max(SMALLEST[launches[("screen", 0, "base")]["device"]["kind"]], expm1(high - low))


def within(values: list[float], delta: float) -> str:
    """Whether the interval leaves no room for a change that counts."""
    return "no regression" if ends(values)[1] < log1p(delta) else "inconclusive"


def code_of(verdicts: list[str], strict: bool) -> int:
    """The exit code that a comparison must have had."""
    judged = [
        v for v in verdicts if v in ("regressed", "improved", "no regression", "inconclusive")
    ]
    noisy = verdicts.count("ungateable")
    if "regressed" in verdicts:
        return 1
    if "missing" in verdicts or "mismatch" in verdicts or not judged:
        return 3
    return (
        4 if strict and ("inconclusive" in verdicts or noisy > 0.2 * (noisy + len(judged))) else 0
    )


def check(folder: Path) -> list[str]:
    """Everything in a folder that does not agree."""
    result = json.loads((folder / "result.json").read_text())
    path = folder / "records.jsonl"
    data = path.read_bytes() if path.exists() else b""
    records, complaints = [json.loads(line) for line in data.splitlines() if line.strip()], []
    if (hashlib.sha256(data).hexdigest() if path.exists() else None) != result["records_sha256"]:
        complaints.append("records.jsonl is not the file that was judged")
    by_name = launches_of(records, result["seed"], complaints)
    sides = {
        side: {(case, ranks) for case, ranks in result["cases"][side]} for side in ("base", "head")
    }
    said = {(row["case"], row["ranks"]): (row["verdict"], row["ratio"]) for row in result["rows"]}
    for name in sorted(sides["base"] | sides["head"] | set(said)):
        mine = verdict(by_name.get(name, {}), name in sides["base"], name in sides["head"])
        if not agree(mine, said.get(name, ("nothing", None))):
            complaints.append(f"{name}: {mine} by these records, the result says {said.get(name)}")
    code = code_of([v for v, _ in said.values()], result["strict"])
    if code != result["exit_code"]:
        complaints.append(
            f"exit code {code} by these verdicts, the result says {result['exit_code']}"
        )
    return complaints


def agree(mine: tuple[str, float | None], said: tuple[str, float | None]) -> bool:
    """Same verdict, and the same ratio but for rounding."""
    if None in (mine[1], said[1]):
        return mine == said
    return mine[0] == said[0] and isclose(mine[1] or 0, said[1] or 0, rel_tol=1e-9)


def main() -> int:
    """The command line; the exit code."""
    if len(sys.argv) < 2:
        print("usage: python -m benchmarks.compare.recompute FOLDER...", file=sys.stderr)
        return 2
    worst = 0
    for name in sys.argv[1:]:
        try:
            complaints = check(Path(name))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{name}: not the result and records of a comparison: {error!r}", file=sys.stderr)
            worst = 2
            continue
        print(
            "\n".join(f"{name}: {text}" for text in complaints)
            or f"{name}: every verdict agrees with the records"
        )
        worst = max(worst, int(bool(complaints)))
    return worst


if __name__ == "__main__":
    raise SystemExit(main())
