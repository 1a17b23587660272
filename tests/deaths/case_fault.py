"""Test a property of a system with a fault; `nox -s deaths` runs this under mpiexec."""

import os

import pytest
from kit.faults import average

pytestmark = pytest.mark.ranks
test_average = average(os.environ["SUT_FAULT"])
