"""Compile the device, once for each version of its sources and of torch, and load it."""

import ctypes
import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent
NAME = "late"
BUILT = HERE.parent.parent / ".nox" / "device"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def library() -> Path:
    """Return the path of the library for the current sources, whether or not it exists."""
    texts = [path.read_bytes() for path in sorted(HERE.glob("runtime.*"))]
    texts += [(HERE / "backend.cpp").read_bytes(), torch.__version__.encode(), str(FLAGS).encode()]
    return BUILT / hashlib.blake2b(b"".join(texts), digest_size=8).hexdigest() / "late.so"


def compile_library() -> Path:
    """Compile the library unless it exists for the current sources; return its path."""
    made = library()
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    compiler, root = os.environ.get("CXX", "g++"), Path(torch.__file__).parent
    include = root / "include"
    paths = (f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}")
    sources = [str(HERE / name) for name in ("runtime.cpp", "backend.cpp")]
    libraries = (f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")
    unfinished = made.with_suffix(f".{os.getpid()}")
    command = (compiler, *FLAGS, *paths, "-shared", *sources, *libraries, "-o", str(unfinished))
    print("+", *command, file=sys.stderr, flush=True)
    subprocess.run(command, check=True)
    unfinished.rename(made)  # atomic: no other process sees an incomplete file
    return made


@cache
def load() -> ctypes.CDLL:
    """Register the device `late` with torch. Compile it first if its sources have changed.

    Returns:
        The library, whose C functions can be called.
    """
    path = str(compile_library())
    torch.ops.load_library(path)
    runtime = ctypes.CDLL(path)
    torch.utils.rename_privateuse1_backend(NAME)  # type: ignore[attr-defined]
    module = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=runtime.late_devices,
        current_device=torch.accelerator.current_device_index,
        set_device=torch.accelerator.set_device_index,
        get_device_name=lambda device: NAME,
        get_device_properties=lambda device: SimpleNamespace(uuid=f"{NAME}-{device.index}"),
        reset_peak_memory_stats=lambda device: None,
        max_memory_allocated=lambda device: 0,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
    )
    torch._register_device_module(NAME, module)
    return runtime
