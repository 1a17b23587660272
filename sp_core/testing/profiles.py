"""Choose how many examples Hypothesis draws for a test, by profile.

The examples are the same in every run for the profiles `pr` (the default, 60 examples), `quick`
(25) and `brief` (6). Every run draws different examples for `soak` (3) and `explore` (SP_EXAMPLES,
by default 5000). SP_PROFILE names the profile.

Hypothesis itself also draws constants that it finds in the loaded modules of the project. Once this
module is imported it does not, or examples would change with every edit of the project.

If a profile that a project has registered itself is loaded instead, the values in which it differs
from Hypothesis' profile `default` replace those of `pr`; its deadline does not. That holds for a
project's own profile named as one above, too: it is not replaced. Hypothesis does not tell which
values of a profile or of `@settings` were given. So without SP_PROFILE a value that is Hypothesis'
own default counts as not given, such as `@settings(max_examples=100)`.
"""

import os
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import InvalidArgument
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

DEFAULT = "pr"
SUPPRESSED = (
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.large_base_example,
    HealthCheck.function_scoped_fixture,
)
_GIVEN = os.environ.get("SP_EXAMPLES") or "5000"
_EXPLORED = int(_GIVEN) if _GIVEN.isdecimal() else 0
_OWN: dict[str, dict[str, Any]] = {
    "pr": {"derandomize": True, "max_examples": 60, "database": None},
    "quick": {"derandomize": True, "max_examples": 25, "database": None},
    # brief and soak also reduce a number that a test itself names
    "brief": {"derandomize": True, "max_examples": 6, "database": None},
    "soak": {"derandomize": False, "max_examples": 3, "database": None},
    "explore": {"derandomize": False, "max_examples": _EXPLORED or 5000},
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


vars(providers)["_get_local_constants"] = Constants  # Hypothesis has no setting for it
_PROFILES = {
    name: settings(
        # not Hypothesis' profile `ci`, which it takes where the variable CI is set
        settings.get_profile("default"),
        deadline=None,  # times include waiting for other ranks
        suppress_health_check=SUPPRESSED,
        print_blob=True,
        phases=set(Phase) - {Phase.explain},  # `explain` traces only the thread that draws
        **values,
    )
    for name, values in _OWN.items()
}
for _name, _profile in _PROFILES.items():
    try:
        settings.get_profile(_name)  # a project's own profile stays
    except InvalidArgument:
        settings.register_profile(_name, _profile)


def load(named: str | None) -> bool:
    """Load the profile of SP_PROFILE (default: `pr`) for all Hypothesis tests of the session.

    Args:
        named: profile named on the command line, which Hypothesis itself loads later; None if there
            is none.

    Returns:
        Whether the profile in use is one of this module that draws different examples in every run.

    Raises:
        ValueError: SP_PROFILE names no profile of this module, or SP_EXAMPLES is no number above 0
            and the profile in use is `explore`.
    """
    wanted = os.environ.get("SP_PROFILE") or DEFAULT
    if wanted not in _OWN:
        raise ValueError(f"SP_PROFILE={wanted!r} is not one of {tuple(_OWN)}.")
    settings.load_profile(wanted)
    used = named or wanted
    is_ours = used in _PROFILES and settings.get_profile(used) is _PROFILES[used]
    if is_ours and used == "explore" and not _EXPLORED:
        raise ValueError(f"SP_EXAMPLES={_GIVEN!r} was given. Set it to a whole number above 0.")
    return is_ours and not _OWN[used]["derandomize"]


def name() -> str:
    """Return the name of the loaded profile if it is one of this module's, else "pr"."""
    return _own_name() or DEFAULT


def _own_name() -> str:
    """Return the name of the loaded profile if it is one of this module's, else "".

    Options of Hypothesis load a copy with another name, such as "brief-with-verbose-verbosity".
    """
    loaded = settings.get_current_profile_name().partition("-with-")[0]
    is_ours = loaded in _PROFILES and settings.get_profile(loaded) is _PROFILES[loaded]
    return loaded if is_ours else ""


def allow_fixtures(test: Any) -> None:
    """Suppress Hypothesis' health check of function-scoped fixtures on a test of `given`.

    pytest sets such a fixture up once for all examples of the test.

    Args:
        test: function or method, whose settings are changed, or made if it has none.
    """
    function = getattr(test, "__func__", test)
    own = getattr(function, "_hypothesis_internal_use_settings", settings())
    suppressed = {*own.suppress_health_check, HealthCheck.function_scoped_fixture}
    function._hypothesis_internal_use_settings = settings(own, suppress_health_check=suppressed)


def _grown(max_examples: int, profile_examples: int) -> int:
    """Return how many examples to draw for a test that names a number itself.

    It is `max_examples` times k, if the profile has k times the examples of `pr`. It is less than
    `max_examples` only for `brief` and `soak`, and there at least 3.
    """
    scaled: int = max_examples * profile_examples // _OWN[DEFAULT]["max_examples"]
    return max(scaled, 3 if name() in ("brief", "soak") else max_examples)


def _differing(own: settings | None, base: settings | None) -> dict[str, Any]:
    """Return the values of `own` that are not those of `base`, by name."""
    values = {name: getattr(own, name) for name in _TAKEN_FROM_TEST}
    return {name: value for name, value in values.items() if value != getattr(base, name)}


def chosen(
    marks: Mapping[str, Any], max_examples: int | None = None, *, seeded: bool = False
) -> settings:
    """Return Hypothesis' settings for one test.

    Args:
        marks: attributes of the test. `sp_core_base` is the profile that was loaded when the test
            was made. Values of `@settings` that equal it are taken from the current profile.
            `deadline` always is, because times include waiting for ranks.
        max_examples: argument of `given`. It overrides `@settings` and the profile, and is changed
            by `_grown`.
        seeded: whether a seed was asked for. Then the examples are drawn from the seed and not from
            the test's name.
    """
    profile = _PROFILES[name()]
    loaded = settings.get_profile(settings.get_current_profile_name())
    values = _differing(loaded, settings.get_profile(_own_name() or "default"))
    if (own := marks.get("_hypothesis_internal_use_settings")) is not None:
        values |= _differing(own, marks.get("sp_core_base", settings.default))
        values["suppress_health_check"] = {*SUPPRESSED, *own.suppress_health_check}
    if max_examples is not None:
        values["max_examples"] = _grown(max_examples, profile.max_examples)
    if seeded:
        values["derandomize"] = False
    if values.get("derandomize", profile.derandomize):
        values["database"] = None
    return settings(profile, **values)
