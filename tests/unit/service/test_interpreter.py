"""What `processor run` does to its interpreter, seen from outside, in one of its own."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# Threads that are alive at the same time take memory; then the C library tells how many arenas it has.
ARENAS = """
import ctypes, sys, threading
from processor.service import interpreter

if sys.argv[1] == "tuned":
    interpreter.tune()
everybody = threading.Barrier(4)

def work():
    blocks = [bytearray(4096) for _ in range(100)]
    everybody.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
out = ctypes.c_void_p.in_dll(libc, "stdout")
libc.malloc_info(0, out)
libc.fflush(out)
"""


def run(code: str, *args: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library: nothing to tune")
def test_threads_share_one_arena() -> None:
    assert run(ARENAS, "tuned").count("<heap nr=") == 1
    assert run(ARENAS, "as it is").count("<heap nr=") > 1, "else there would be nothing to tune"


def test_event_loop_is_seldom_interrupted() -> None:
    code = "import sys; from processor.service import interpreter; interpreter.tune(); print(sys.getswitchinterval())"
    assert float(run(code)) > 0.01
