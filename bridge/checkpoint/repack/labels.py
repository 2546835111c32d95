"""Corrects config.json and quantize_config.json to match the data."""

import json
import re
from pathlib import Path
from typing import Any

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.labels.quant_config import gptq_labels, packer
from bridge.checkpoint.repack.zero_points import ZeroPointPlan
from bridge.system.fields import table
from bridge.system.storage.files import read_json

_PACKING = {"gptq": "auto_round:auto_gptq", "gptq_v2": "auto_round:gptqmodel"}  # auto-round's own names


class Labels:
    """The corrected configs.

    files    name -> text of each file that changes
    changes  in words: "checkpoint_format gptq -> gptq_v2 (config.json)"
    """

    def __init__(self, ckpt: Checkpoint, plan: ZeroPointPlan) -> None:
        self.files: dict[str, str] = {}
        self._ckpt, self._plan = ckpt, plan
        self._changes: dict[str, list[str]] = {}
        labelled = False
        for name in ("config.json", "quantize_config.json", "quant_config.json"):
            file = next((f for f in (ckpt.home / name, ckpt.path / name) if f.is_file()), None)
            if file:
                content = read_json(file)
                labels = content.get("quantization_config") if name == "config.json" else content
                if isinstance(labels, dict) and labels:
                    labelled = True
                    self._mend(labels, name)
                    self._record(file, content)
        if not labelled:
            content = read_json(ckpt.home / "config.json")
            content["quantization_config"] = self._new()
            self._changes["quantization_config added"] = ["config.json"]
            self._record(ckpt.home / "config.json", content)
        self.changes = [f"{change} ({', '.join(names)})" for change, names in self._changes.items()]

    def _mend(self, labels: dict[str, Any], file: str) -> None:
        for key, value in self._true_values(labels).items():
            old = labels.get(key)
            if old != value or type(old) is not type(value):
                labels[key] = value
                before = "" if old is None else f"{old} -> " if not isinstance(old, dict) else ""
                text = value if not isinstance(value, dict) else f"packer {value['packer'][0]}"
                self._changes.setdefault(f"{key} {before}{text}", []).append(file)

    def _true_values(self, labels: dict[str, Any]) -> dict[str, Any]:
        """The config's keys that the data determines, and their values."""
        quant, plan = self._ckpt.quant, self._plan
        values: dict[str, Any] = {}
        if str(labels.get("quant_method")).lower() in ("auto-round", "auto_round", "intel/auto-round"):
            key = "packing_format" if "packing_format" in labels or "backend" not in labels else "backend"
            if quant.checkpoint_format != plan.format:
                values[key] = _PACKING[plan.format]
        else:
            # without either, v1 is assumed
            if "checkpoint_format" in labels or ("format" not in labels and plan.format != "gptq"):
                values["checkpoint_format"] = plan.format
            if "format" in labels:
                values["format"] = plan.format
        if plan.restated:
            values["meta"] = {**table(labels.get("meta")), "packer": packer()}
        if not quant.dynamic and not quant.extra:
            values |= self._true_shapes(labels)
        return values

    def _true_shapes(self, labels: dict[str, Any]) -> dict[str, Any]:
        """bits, group_size, desc_act and sym, if the config is wrong for all modules."""
        modules, values = self._ckpt.modules, {}
        bits = {info.bits for info in modules.values()}
        if len(bits) == 1 and "bits" in labels:
            values["bits"] = bits.pop()
        claimed = labels.get("group_size")
        if isinstance(claimed, int) and any(
            info.group_size != (claimed if 0 < claimed < info.shape[1] else info.shape[1]) for info in modules.values()
        ):
            sizes = {info.group_size for info in modules.values() if info.group_size < info.shape[1]}
            if len(sizes) <= 1:
                values["group_size"] = sizes.pop() if sizes else -1
        if labels.get("sym") is True and not all(self._plan.symmetric.values()):
            values["sym"] = False
        if labels.get("desc_act") is False and self._scattered():
            values["desc_act"] = True
        return values

    def _scattered(self) -> bool:
        return any(self._ckpt.group_order(name) is not None for name in self._ckpt.modules)

    def _new(self) -> dict[str, Any]:
        """A new config, if there was none."""
        quant = self._ckpt.quant
        sym = all(self._plan.symmetric.values())
        return gptq_labels(self._plan.format, quant.bits, quant.group_size, desc_act=self._scattered(), sym=sym)

    def _record(self, file: Path, content: dict[str, Any]) -> None:
        """Record the file's new text, with the old indentation and line end."""
        old = file.read_text(encoding="utf-8")
        if content == json.loads(old):
            return
        indent = re.match(r"\{\s*\n( +|\t)", old)
        text = json.dumps(content, indent=indent[1] if indent else None, ensure_ascii=False)
        self.files[file.name] = text + ("\n" if old.endswith("\n") else "")
