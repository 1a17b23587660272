"""Ordinary property tests follow the kit's `pr` profile: the same examples every time, and no deadlines, which load would break."""

from hypothesis import settings

from sp_core.testing import profiles

settings.load_profile(profiles.DEFAULT)
