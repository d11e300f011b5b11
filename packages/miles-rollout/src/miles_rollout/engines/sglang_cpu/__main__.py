"""`python -m miles_rollout.engines.sglang_cpu`."""

from __future__ import annotations

import sys

from miles_rollout.engines.sglang_cpu import launch

if __name__ == "__main__":
    # A spawned process imports its parent's main module as `__mp_main__`, and gets the stand-ins that way, but
    # multiprocessing leaves the `__main__.py` of a package out. So name the module that it is to import.
    sys.modules["__main__"].__spec__ = launch.__spec__
    sys.exit(launch.main(sys.argv[1:]))
