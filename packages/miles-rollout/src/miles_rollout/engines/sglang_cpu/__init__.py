"""The stock SGLang wheel on a machine without a GPU, without `sgl_kernel` and without Triton.

`python -m miles_rollout.engines.sglang_cpu --model-path …` takes every option of `python -m sglang.launch_server`.
Everything here runs inside the engine's processes and nowhere else.

    launch.py    the order of things: check, prepare, import once, fork, serve
    absent.py    stand-ins for packages that SGLang imports and never uses on a CPU
    kernels.py   a stand-in for `sgl_kernel`
    patches.py   the places of SGLang that assume a GPU, each with its reason
    models.py    import the model that is served, not all two hundred

Tested with the versions in `miles_rollout.engines.versions.SUPPORTED`; remove it when SGLang serves Qwen3 on a CPU
from its own wheel.
"""
