"""Print what GPUs there are; exit with the reason where there is none that computes."""

from __future__ import annotations

import importlib.util
import sys


def main() -> None:
    missing = [name for name in ("torch", "pytest", "numpy", "msgspec") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"gpu: {sys.executable} lacks {', '.join(missing)}. tests/gpu/README.md says how to make .venv-gpu.")
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"gpu: torch {torch.__version__} sees no CUDA device (built for CUDA {torch.version.cuda}).")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        product = torch.ones(64, 64, device=f"cuda:{index}") @ torch.ones(64, 64, device=f"cuda:{index}")
        if product[0, 0].item() != 64:
            sys.exit(f"gpu: device {index} computes 64 ones as {product[0, 0].item()}.")
        print(f"  {index}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute {facts.major}.{facts.minor}")


if __name__ == "__main__":
    main()
