"""Programs that `torch.export.save` wrote (.pt2), read as data: a graph in JSON, weights as bytes.

`torch.export.load` unpickles parts of the archive, evaluates expressions from its text and takes any attribute of
torch for an operation. Here the graph is rebuilt, node by node: operations are those of `torch.ops.aten` and
arithmetic on sizes, everything else is refused, and no expression is evaluated, since a size is a number by the time
the graph runs.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from spiritlevel.errors import InputError, first_line
from spiritlevel.loading.arrays import check_size
from spiritlevel.storage import check_readable

_FORMAT = 8  # the major version of PyTorch's schema that is read here
_TYPES = {
    **{1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64},
    **{6: torch.float16, 7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16},
}
_MEMORY = {
    **{1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format},
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in "add sub mul floordiv mod neg pow truediv".split()},
    **{f"_operator.{name}": getattr(operator, name) for name in "eq ne lt le gt ge and_ or_ getitem".split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_max", "sym_min", "sym_float", "sym_not")},
}
_CHECKS = re.compile(r"torch\.ops\.aten\.(_assert|sym_constrain_range)")  # which return nothing
_FILES = ("from_file",)  # the operation that opens any file it names


def archived(path: Path, member: str) -> bool:
    """Whether a file is an archive of PyTorch's with a member, or a folder, of this name."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.partition("/")[2].startswith(member) for name in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError):
        return False


def exported_program(path: Path) -> nn.Module:
    """The graph of a saved program as a module, with its parameters under their names.

    It must have been exported in eval mode and for batches of any size, since samples are measured alone and together.
    """
    check_readable(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_size(sum(member.file_size for member in archive.infolist()), path)
            files = {name.partition("/")[2]: name for name in archive.namelist()}
            program = json.loads(archive.read(files["models/model.json"]))
            if program["schema_version"]["major"] != _FORMAT:
                raise InputError(
                    f"{path.name} was saved by torch {program.get('torch_version', 'of another version')}, in a format "
                    f"that torch {torch.__version__} does not write; export the model again."
                )
            state = {
                **_tensors(archive, files, "data/weights/", "model_weights_config.json"),
                **_tensors(archive, files, "data/constants/", "model_constants_config.json"),
            }
        return _Reader(path, program["graph_module"], state).module()
    except InputError:
        raise
    except Exception as error:  # a damaged archive can raise almost anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{path} is not a program that torch.export.save() wrote, or is damaged ({reason})."
        ) from error


def _tensors(archive: zipfile.ZipFile, files: Mapping[str, str], folder: str, config: str) -> dict[str, Tensor]:
    """The tensors of a folder by their names; those that share memory in the program share it here."""
    made: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, entry in json.loads(archive.read(files[folder + config]))["config"].items():
        meta = entry["tensor_meta"]
        if entry["use_pickle"] or meta is None:
            raise InputError(
                f"{Path(str(archive.filename)).name} holds {name} as a pickled object, which is not opened, because "
                "that could run a program; export the model with plain tensors as weights."
            )
        key = json.dumps(entry, sort_keys=True)
        if key not in made:
            raw = bytearray(archive.read(files[folder + entry["path_name"]]))
            kind = _TYPES[meta["dtype"]]
            flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            sizes, strides = ([size["as_int"] for size in meta[what]] for what in ("sizes", "strides"))
            tensor = flat.as_strided(sizes, strides, meta["storage_offset"]["as_int"])
            made[key] = nn.Parameter(tensor, requires_grad=meta["requires_grad"]) if entry["is_param"] else tensor
        found[name] = made[key]
    return found


class _Reader:
    """One program on its way from JSON to a graph."""

    def __init__(self, path: Path, program: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
        self.path, self.program, self.state = path, program, state
        self.graph, self.root = fx.Graph(), nn.Module()
        self.values: dict[str, Any] = {}  # what the names of the program stand for

    def module(self) -> nn.Module:
        """The graph as a module."""
        graph, signature = self.program["graph"], self.program["signature"]
        for spec in sorted(signature["input_specs"], key=lambda spec: "user_input" not in spec):  # arguments first
            ((kind, entry),) = spec.items()
            self._input(kind, entry, graph["tensor_values"])
        for node in graph["nodes"]:
            self._node(node)
        outputs = [spec["user_output"]["arg"] for spec in signature["output_specs"] if "user_output" in spec]
        self.graph.output(self._result([self._value(argument) for argument in outputs]))
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph, class_name="ExportedProgram")

    def _input(self, kind: str, entry: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
        if kind == "user_input":
            name = entry["arg"]["as_tensor"]["name"]
            if not name.isidentifier() or keyword.iskeyword(name):
                raise InputError(f"{self.path.name}: the argument {name!r} does not have a valid Python name.")
            sizes = shapes[name]["sizes"]
            if sizes and "as_int" in sizes[0]:
                raise InputError(
                    f"{self.path.name} was exported for batches of exactly {sizes[0]['as_int']}; export it for any "
                    "number of samples: torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))."
                )
            self.values[name] = self.graph.placeholder(name)
        elif kind in ("parameter", "buffer", "tensor_constant"):
            name = entry[f"{kind}_name"]
            self._hold(name, self.state[name])
            self.values[entry["arg"]["name"]] = self.graph.get_attr(name)
        elif kind == "constant_input":
            ((what, value),) = entry["value"].items()
            self.values[entry["name"]] = None if what == "as_none" else value
        else:
            raise InputError(
                f"{self.path.name} takes a {kind.replace('_', ' ')}, which is not a tensor; it is not opened."
            )

    def _hold(self, name: str, tensor: Tensor) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*", name):
            raise InputError(f"{self.path.name}: the weight {name!r} does not have a valid Python name.")
        *folders, last = name.split(".")
        place = self.root
        for folder in folders:
            if folder not in place._modules:
                place.add_module(folder, nn.Module())
            place = place.get_submodule(folder)
        if isinstance(tensor, nn.Parameter):
            place.register_parameter(last, tensor)
        else:
            place.register_buffer(last, tensor)

    def _node(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        if _CHECKS.match(target):
            return
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for given in node["inputs"]:
            if given["name"] in ("train", "training") and given["arg"].get("as_bool"):
                raise InputError(
                    f"{self.path.name} was exported in training mode ({target.split('.')[-2]}); call model.eval() "
                    "before torch.export.export()."
                )
            value = self._value(given["arg"])
            if given["kind"] == 2:
                kwargs[given["name"]] = value
            else:
                args.append(value)
        made = self.graph.call_function(self._operation(target), tuple(args), kwargs)
        names = [_names(output) for output in node["outputs"]]
        if len(names) == 1 and isinstance(names[0], str):
            self.values[names[0]] = made
            return
        for place, name in enumerate(names if len(names) > 1 else names[0]):
            if name is not None:
                self.values[name] = self.graph.call_function(operator.getitem, (made, place))

    def _operation(self, target: str) -> Callable[..., Any]:
        if target in _ARITHMETIC:
            return _ARITHMETIC[target]
        known = re.fullmatch(r"torch\.ops\.aten\.(\w+)\.(\w+)", target)
        if known is not None and known[1] not in _FILES:
            packet = getattr(torch.ops.aten, known[1], None)
            found = getattr(packet, known[2], None)
            if isinstance(found, torch._ops.OpOverload):
                return found
        raise InputError(
            f"{self.path.name} uses {target!r}, but only operations of torch.ops.aten are run from a file; measure the "
            "module that it was exported from."
        )

    def _value(self, argument: Mapping[str, Any]) -> Any:
        """What an argument stands for: an earlier result, or a plain value."""
        ((kind, value),) = argument.items()
        if kind == "as_none":
            return None
        if kind in ("as_bool", "as_int", "as_float", "as_string", "as_bools", "as_ints", "as_floats", "as_int_lists"):
            return value
        if kind == "as_tensor":
            return self.values[value["name"]]
        if kind == "as_name":
            return self.values[value]
        if kind == "as_tensors":
            return [self.values[each["name"]] for each in value]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
            return self._value(value)
        if kind in ("as_sym_ints", "as_sym_floats", "as_sym_bools", "as_optional_tensors"):
            return [self._value(each) for each in value]
        if kind == "as_scalar_type":
            return _TYPES[value]
        if kind == "as_memory_format":
            return _MEMORY[value]
        if kind == "as_layout" and value == 7:
            return torch.strided
        if kind == "as_device":
            return (
                torch.device(value["type"]) if value["index"] is None else torch.device(value["type"], value["index"])
            )
        raise InputError(f"{self.path.name} uses an argument of kind {kind!r}, which is not read from a file.")

    def _result(self, outputs: list[Any]) -> Any:
        """A tensor, a dict under the names that the program's own result had, or a tuple."""
        if len(outputs) == 1:
            return outputs[0]
        whole = self.program["module_call_graph"][0]["signature"]["out_spec"]
        keys = json.loads(json.loads(whole)[1]["context"] or "null")
        if isinstance(keys, list) and len(keys) == len(outputs) and all(isinstance(key, str) for key in keys):
            return dict(zip(keys, outputs, strict=True))
        return tuple(outputs)


def _names(output: Mapping[str, Any]) -> Any:
    """The name of a result, or a list of names where an operation returns a list."""
    ((kind, value),) = output.items()
    if kind == "as_tensors":
        return [each["name"] for each in value]
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        return value["as_name"]
    if kind == "as_optional_tensor":
        return _names(value)
    return value["name"] if kind == "as_tensor" else None
