"""Recipes as the `quantization_config` of a Hugging Face folder, which SGLang, vLLM and Transformers read.

    format                      quant_method        names of the tensors of `x`
    fp8_RxC                     fp8                 x.weight, x.weight_scale_inv
    fp8_tensor                  fp8                 x.weight, x.weight_scale
    mxfp8                       mxfp8               x.weight, x.weight_scale_inv
    nvfp4                       modelopt            x.weight, x.weight_scale, x.weight_scale_2, x.input_scale
    int4_gN, mxfp4, fp8_row     compressed-tensors  x.weight_packed (fp8_row: x.weight), x.weight_scale, x.weight_shape

The standard keys do not say which scale rule made the codes. That stands in `miles_quant.json` beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import QuantError
from ..formats.names import FormatName, parse_name
from .recipe import Recipe

RECIPE_FILE = "miles_quant.json"
MODELOPT_FILE = "hf_quant_config.json"


def quantization_config(recipe: Recipe, kept: Iterable[str] = ()) -> dict[str, Any]:
    """What `config.json` says under `quantization_config`.

    Args:
        kept: names of modules or weights that stay as they are, listed for the loader.

    Raises:
        QuantError: no engine loads a checkpoint in this format.
    """
    name = parse_name(recipe.format)
    modules = _modules(kept)
    match name.family:
        case "fp8" if name.layout != "row":
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                # Spelled out when there is none: Transformers takes an absent key for 128 x 128.
                "weight_block_size": None if name.layout == "tensor" else [int(n) for n in name.layout.split("x")],
                **({"scale_fmt": "ue8m0"} if name.rule == "te_pow2" else {}),
                "modules_to_not_convert": modules,
            }
        case "mxfp8":
            return {
                "quant_method": "mxfp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [1, 32],
                "scale_fmt": "ue8m0",
                "modules_to_not_convert": modules,
            }
        case "nvfp4" if name.has_tensor_scale:
            return {"quant_method": "modelopt", **_modelopt(), "ignore": modules}
        case "int4" | "mxfp4" | "fp8":
            return _compressed_tensors(name, modules)
        case _:
            raise QuantError(f"No engine loads a checkpoint in {name}; it is a format of activations or comparisons.")


def modelopt_config(recipe: Recipe, kept: Iterable[str] = ()) -> dict[str, Any] | None:
    """What `hf_quant_config.json` says, which loaders of NVFP4 read too; None for other formats."""
    if parse_name(recipe.format).family != "nvfp4":
        return None
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
    return {"producer": {"name": "miles-quant"}, "quantization": {**quantization, "exclude_modules": _modules(kept)}}


def recipe_of_config(config: Mapping[str, Any]) -> Recipe:
    """The recipe behind a `quantization_config` (or an `hf_quant_config.json`), whoever wrote it.

    Where the scale rule is not written, the recipe names the family's default; reading codes back needs no rule.

    Raises:
        QuantError: a method or layout that no format here covers, named.
    """
    if "quantization" in config:
        inner = _table(config["quantization"], "quantization")
        config = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules", ())}
    method = str(config.get("quant_method", "")).lower()
    match method:
        case "fp8":
            format = _fp8_name(config)
            kept = config.get("modules_to_not_convert") or config.get("ignored_layers")
        case "mxfp8":
            format, kept = "mxfp8/rceil", config.get("modules_to_not_convert")
        case "modelopt" | "modelopt_fp4":
            if str(config.get("quant_algo", "")).upper() != "NVFP4":
                raise QuantError(f"ModelOpt's {config.get('quant_algo')!r} is not covered; only NVFP4 is.")
            format, kept = "nvfp4/modelopt", config.get("ignore") or config.get("exclude_modules")
        case "compressed-tensors":
            format, kept = _compressed_name(config), config.get("ignore")
        case _:
            raise QuantError(f"The quantization_config has quant_method {method!r}; covered are fp8, mxfp8, modelopt "
                             "(NVFP4) and compressed-tensors.")  # fmt: skip
    if isinstance(kept, str) or not all(isinstance(module, str) for module in kept or ()):
        raise QuantError(f"The modules to keep are {kept!r}; they are a list of names.")
    # A trailing dot keeps `mlp.gate` from matching `mlp.gate_proj`.
    return Recipe(format=format, only=(), keep_bf16=tuple(f"{module}." for module in kept or ()))


def _modules(kept: Iterable[str]) -> list[str]:
    return sorted({name.removesuffix(".weight") for name in kept})


def _fp8_name(config: Mapping[str, Any]) -> str:
    rule = "te_pow2" if config.get("scale_fmt") == "ue8m0" else "div"
    block = config.get("weight_block_size")
    if config.get("fmt", "e4m3") != "e4m3":
        raise QuantError(f"FP8 of fmt {config['fmt']!r} is not covered; e4m3 is.")
    match block:
        case None:
            return f"fp8_tensor/{rule}"
        case [int(rows), int(columns)]:
            return f"fp8_{rows}x{columns}/{rule}"
        case _:
            raise QuantError(f"`weight_block_size` is {block!r}; it is a list of rows and columns, or null.")


def _table(value: Any, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise QuantError(f"`{key}` of the quantization_config is {value!r}, not a table.")
    return value


def _modelopt() -> dict[str, Any]:
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_algo": "NVFP4",
        "producer": {"name": "miles-quant"},
        "config_groups": {
            "group_0": {"weights": operand, "input_activations": {**operand, "dynamic": True}, "targets": ["Linear"]}
        },
    }


def _compressed_tensors(name: FormatName, modules: list[str]) -> dict[str, Any]:
    weights: dict[str, Any] = {"symmetric": True, "dynamic": False}
    inputs = None
    match name.family:
        case "int4":
            layout = "pack-quantized"
            weights |= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": int(name.layout)}
        case "mxfp4":
            layout = "mxfp4-pack-quantized"
            weights |= {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
            weights |= {"scale_dtype": "torch.uint8"}
        case _:
            layout = "float-quantized"
            weights |= {"num_bits": 8, "type": "float", "strategy": "channel"}
            inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": modules,
    }


def _compressed_name(config: Mapping[str, Any]) -> str:
    groups = list(_table(config.get("config_groups") or {}, "config_groups").values())
    weights = _table(_table(groups[0], "config_groups").get("weights"), "weights") if len(groups) == 1 else {}
    if weights.get("actorder") in ("group", True):
        raise QuantError("compressed-tensors with `actorder` by group stores columns in another order; not covered.")
    kind = (config.get("format"), weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
    match kind:
        case ("pack-quantized", 4, "int", "group") if weights.get("symmetric", True):
            return f"int4_g{weights.get('group_size')}/miles"
        case ("mxfp4-pack-quantized", 4, "float", "group"):
            return "mxfp4/rceil"
        case ("float-quantized", 8, "float", "channel"):
            return "fp8_row/div"
        case _:
            raise QuantError(
                f"compressed-tensors with (format, bits, type, strategy) = {kind} in {len(groups)} groups is not "
                "covered; what is: pack-quantized INT4 groups, mxfp4-pack-quantized, and FP8 per channel, in one group."
            )
