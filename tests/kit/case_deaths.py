"""A test whose planted fault ends or hangs a rank; test_kit_launch.py runs it."""

import os

from hypothesis import strategies as st
from kit.faults import average

ONE = {"nprocs": st.just(2), "d": st.just(1), "seed": st.just(0)}
test_average = average(os.environ["SUT_FAULT"], n=st.integers(6, 9), **ONE)
