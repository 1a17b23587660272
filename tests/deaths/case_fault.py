"""A property of a system with a fault, run by `nox -s deaths` under mpiexec."""

import os

from kit.faults import average

test_average = average(os.environ["SUT_FAULT"])
