"""Test a property of a system with a fault; `nox -s deaths` runs this under mpiexec."""

import os

from kit.faults import average

test_average = average(os.environ["SUT_FAULT"])
