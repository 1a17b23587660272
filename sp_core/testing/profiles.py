"""Choose how many examples a test draws.

The profiles `pr` (default), `quick`, `brief`, `soak` and `explore`.

SP_PROFILE names the profile; SP_EXAMPLES says how many examples a test gets in `explore`.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

DEFAULT = "pr"
FEWEST = 3
SMALLER = ("brief", "soak")
SUPPRESSED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
)
_OWN: dict[str, dict[str, Any]] = {
    "pr": {"derandomize": True, "max_examples": 60, "database": None},
    "quick": {"derandomize": True, "max_examples": 25, "database": None},
    "brief": {
        "derandomize": True,
        "max_examples": 6,
        "database": None,
    },  # these two also of a test that says how many it wants
    "soak": {"derandomize": False, "max_examples": 3, "database": None},
    "explore": {"derandomize": False, "max_examples": int(os.environ.get("SP_EXAMPLES", "5000"))},
}
_TAKEN_FROM_TEST = (
    "max_examples",
    "derandomize",
    "database",
    "phases",
    "verbosity",
    "report_multiple_bugs",
    "stateful_step_count",
)


for (
    _name,
    _values,
) in _OWN.items():  # without deadlines, because times include waiting for other ranks
    settings.register_profile(
        _name,
        deadline=None,
        suppress_health_check=SUPPRESSED,
        print_blob=True,
        phases=set(Phase) - {Phase.explain},  # it sees only the thread that draws
        **_values,
    )


def load(named: str | None) -> bool:
    """Load the profile that the environment names, for all Hypothesis tests of the session.

    Args:
        named: the profile of the command line, which Hypothesis loads itself.

    Returns:
        Whether the profile in use draws other examples on every run.
    """
    wanted = os.environ.get("SP_PROFILE") or DEFAULT
    if wanted not in _OWN:
        raise ValueError(f"SP_PROFILE={wanted!r} is not one of {tuple(_OWN)}.")
    settings.load_profile(wanted)
    return not _OWN.get(named or wanted, _OWN[DEFAULT])["derandomize"]


def name() -> str:
    """Return the loaded profile if it is one of these, else `pr`."""
    loaded = settings.get_current_profile_name()
    return loaded if loaded in _OWN else DEFAULT


def allow_fixtures(test: Any) -> None:
    """Let a test use function-scoped fixtures, set up once for all examples of the test."""
    function = getattr(test, "__func__", test)
    own = function._hypothesis_internal_use_settings
    suppressed = {*own.suppress_health_check, HealthCheck.function_scoped_fixture}
    function._hypothesis_internal_use_settings = settings(own, suppress_health_check=suppressed)


def _grown(max_examples: int, profile_examples: int) -> int:
    """Return a test's own number of examples, in proportion to the profile's."""
    usual: int = _OWN[DEFAULT]["max_examples"]
    scaled = max_examples * profile_examples // usual
    return max(scaled, FEWEST) if name() in SMALLER else max(max_examples, scaled)


def chosen(
    own: settings | None, max_examples: int | None = None, *, seeded: bool = False
) -> settings:
    """Return the settings for one test.

    Args:
        own: of `@settings` on the test. Values that it leaves at Hypothesis' default are taken from
            the profile.
        max_examples: given to `given`; wins over both, and grows in a profile with more examples
            than `pr`.
        seeded: a seed was asked for, so the examples are drawn from it and not from the test's
            name.
    """
    profile = settings.get_profile(name())
    values: dict[str, Any] = (
        {} if max_examples is None else {"max_examples": _grown(max_examples, profile.max_examples)}
    )
    if own is not None:
        differing = {
            field: getattr(own, field)
            for field in _TAKEN_FROM_TEST
            if getattr(own, field) != getattr(settings.default, field)
        }
        values = {**differing, **values}
        values["suppress_health_check"] = {*SUPPRESSED, *own.suppress_health_check}
    if seeded:
        values["derandomize"] = False
    if values.get("derandomize", profile.derandomize):
        values["database"] = None
    return settings(profile, **values)
