"""Models of other libraries: a folder that transformers saved, a name that timm knows. Nothing in a folder is run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from spiritlevel.errors import InputError, first_line, needs, unknown_name
from spiritlevel.storage import check_readable

# What a configuration may ask for that would fetch or import code: kernels from elsewhere, modules beside the weights.
_CODE = ("attn_implementation", "experts_implementation", "auto_map", "kernel_config", "custom_pipelines")


def saved_transformer(folder: Path) -> nn.Module:
    """The model that `save_pretrained` wrote: its class is one of transformers' own, its weights are safetensors.

    No code of the folder is run and nothing is fetched. Attention is used in its plain form, which has all derivatives.
    """
    if not folder.is_dir():
        raise InputError(f"hf:{folder} must be a folder that save_pretrained() has written, but it does not exist.")
    settings = _settings(folder)
    with needs(f"hf:{folder}"):
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    names = settings.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if settings.get("model_type") not in CONFIG_MAPPING or not is_model:
        raise InputError(
            f"hf:{folder} asks for {name or 'no class at all'} ({settings.get('model_type')}), which transformers "
            f"{transformers.__version__} does not have; code in the folder is not run: return such a model from "
            "file.py:function."
        )
    made: Any = kind
    try:
        with _quietly(transformers):
            model, found = made.from_pretrained(
                folder,
                config=CONFIG_MAPPING[settings["model_type"]].from_dict(_without_code(settings)),
                attn_implementation="eager",
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # a damaged file can raise almost anything
        raise InputError(f"hf:{folder} cannot be read: {first_line(error) or type(error).__name__}.") from error
    for what, where in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        if keys := sorted(map(str, found.get(what) or ())):
            more = f" and {len(keys) - 1:,} more" if len(keys) > 1 else ""
            raise InputError(
                f"the weights in {folder} {where} {keys[0]}{more}, which {name} needs and would draw at random; save "
                "the whole model with save_pretrained()."
            )
    return model


def _settings(folder: Path) -> dict[str, Any]:
    """The configuration, once the folder is known to hold a whole model as plain numbers."""
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"hf:{folder} holds an adapter (peft), without the model that it belongs to; save "
            "model.merge_and_unload(), or return the model with its adapter from file.py:function."
        )
    path = folder / "config.json"
    if not path.exists():
        raise InputError(f"hf:{folder} must be a folder that save_pretrained() has written: it has no config.json.")
    if not any((folder / f"model.safetensors{end}").exists() for end in ("", ".index.json")):
        raise InputError(
            f"hf:{folder} has no model.safetensors; other files of weights are not opened: save the model again with "
            "save_pretrained(), which writes one."
        )
    check_readable(path)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {first_line(error)}.") from error
    if not isinstance(settings, dict):
        raise InputError(f"{path} must hold a configuration, got a {type(settings).__name__}.")
    if settings.get("quantization_config"):
        raise InputError(f"hf:{folder} holds quantised weights, which have no derivatives; save it in full precision.")
    return settings


def _without_code(settings: Any) -> Any:
    """A configuration without anything, at any depth, that would fetch code."""
    if isinstance(settings, list):
        return [_without_code(each) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {key: _without_code(value) for key, value in settings.items() if not any(word in key for word in _CODE)}


@contextmanager
def _quietly(transformers: Any) -> Iterator[None]:
    """Without progress bars and warnings: what matters is said in one sentence afterwards."""
    noise = transformers.utils.logging
    level, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    noise.set_verbosity(logging.CRITICAL)
    noise.disable_progress_bar()
    try:
        yield
    finally:
        noise.set_verbosity(level)
        if bars:
            noise.enable_progress_bar()


def timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    """The network that timm has under a name, as built; its weights come from your own file, never from elsewhere."""
    with needs(f"timm:{name}"):
        try:
            import timm
        except ModuleNotFoundError as error:
            if error.name != "torchvision":
                raise
            raise InputError(
                f"timm:{name} needs torchvision, which timm imports and which is not installed: run pip install "
                "'spiritlevel[timm]'."
            ) from error
    if name not in timm.list_models():
        raise unknown_name("timm network", name, timm.list_models(), {})
    try:
        return timm.create_model(name, pretrained=False, **options)
    except Exception as error:  # a network may do anything with options it does not know
        raise InputError(f"timm:{name} cannot be built with {options}: {first_line(error)}.") from error
