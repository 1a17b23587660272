"""Makes the benchmarks of this folder run under mpiexec; `python -m benchmarks.record` starts them."""

from benchmarks.harness.plugin import (
    parallel_benchmark,
    pytest_addoption,
    pytest_configure,
    pytest_generate_tests,
)

__all__ = ["parallel_benchmark", "pytest_addoption", "pytest_configure", "pytest_generate_tests"]
