"""Where a calibration gets its model from: one in memory, or a checkpoint directory read a layer at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from retrofox.anatomy import inner_model, is_new_tensor, on_meta
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.configs import base_config
from retrofox.loading.shards import find
from retrofox.loading.tokenizers import load_tokenizer
from retrofox.surgery import apply, make_plan, with_new_modules


class LayerSource:
    """A converted model whose decoder layers may be empty until `layer(n)` fills one.

    Attributes:
        model: the converted model, in float32 where it was read from a checkpoint for a CPU.
        dtype: what the checkpoint's own tensors are stored in: the dtype for refitted projections.
        tokenizer: the one beside the model, or None.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, tokenizer: Any):
        self.model, self.dtype, self.tokenizer = model, dtype, tokenizer

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[Any]:
        """Decoder layer `number`, its weights in memory inside the block."""
        yield inner_model(self.model).layers[number]  # type: ignore[index]

    def samples(self) -> Iterator[torch.Tensor]:
        """A few of the weights, by which a run on another model is told: embeddings' start and the first attention."""
        yield self.model.get_input_embeddings().weight[:256]  # type: ignore[index]
        with self.layer(0) as layer:
            yield from layer.self_attn.parameters()


class Checkpoint(LayerSource):
    """A directory of safetensors shards: embeddings, norms and head are read at once, layers one at a time."""

    def __init__(self, directory: Path, spec: FoxSpec | None):
        """Raises ValueError where tensor names in the files are not those of the model (see `layerwise`)."""
        plan = make_plan(base_config(directory), spec or FoxSpec(), base=str(directory))
        self._files = tensor_files(directory)
        model = with_new_modules(plan)
        _fill_buffers(model, plan.config)
        outside = [n for n in model.state_dict() if ".layers." not in n and n in self._files]
        state = self._read({name: name for name in outside})
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        super().__init__(model.eval(), self.stored_dtype(outside), load_tokenizer(directory))

    def stored_dtype(self, names: list[str]) -> torch.dtype:
        with safe_open(self._files[names[0]], "pt") as file:
            return file.get_tensor(names[0]).dtype

    @contextlib.contextmanager
    def layer(self, number: int) -> Iterator[Any]:
        layer: Any = inner_model(self.model).layers[number]  # type: ignore[index]
        prefix = f"{self.model.base_model_prefix}.layers.{number}."
        own = [name for name in layer.state_dict() if not is_new_tensor(name)]
        layer.load_state_dict(self._read({prefix + name: name for name in own}), strict=False, assign=True)
        try:
            yield layer
        finally:
            empty = {name: value.to("meta") for name, value in layer.state_dict().items() if name in own}
            layer.load_state_dict(empty, strict=False, assign=True)

    def _read(self, names: dict[str, str]) -> dict[str, torch.Tensor]:
        """Tensors by new name, float32."""
        tensors = {}
        for old, new in names.items():
            with safe_open(self._files[old], "pt") as file:
                tensors[new] = file.get_tensor(old).float()
        return tensors


def _fill_buffers(model: PreTrainedModel, config: Any) -> None:
    """Gives a meta model the buffers that no file holds, outside its layers: rotary frequencies, embedding scales."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = 1
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:1]
    real = dict(type(model)(short).named_modules())
    for name, module in model.named_modules():
        if ".layers." in name or name not in real:
            continue
        twin = real[name]
        if name.endswith("rotary_emb"):
            twin = type(module)(config)  # type: ignore[call-arg]  # the short model may lack a layer type of the whole
        module._buffers.update(twin._buffers)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, of the weights that transformers loads; empty for .bin files."""
    found = find(directory)
    return {} if found.pickled else {name: found.files[file] for name, file in found.weight_map.items()}


def layerwise(directory: Path) -> bool:
    """Whether a directory's tensors carry the names the model gives them, so that a layer can be read on its own.

    Not so for .bin files and for families that transformers renames or fuses on loading.
    """
    files = tensor_files(directory)
    if not files:
        return False
    plan = make_plan(base_config(directory), FoxSpec())
    model = on_meta(plan.model_type, plan.config)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return all(name in files or name in tied or is_new_tensor(name) for name in model.state_dict())


def open_source(
    source: PreTrainedModel | str | os.PathLike, spec: FoxSpec | None, revision: str | None, layers_on_disk: bool | None
) -> LayerSource:
    """The converted form of whatever a calibration is asked to work on.

    Args:
        layers_on_disk: read a directory's layers one at a time (True), load it whole (False), or None: one at a time
            where that is possible.

    Raises:
        ValueError: a converted live model together with a spec, or layers on disk asked for where they can't be read.
    """
    if isinstance(source, PreTrainedModel):
        converted = source.config.model_type.startswith("fox_")
        if converted and spec is not None:
            raise ValueError("a converted model has its own spec: pass spec=None, or calibrate its base model")
        if converted:
            _require_own_queries(source)
        return LayerSource(source if converted else _converted(source, spec), source.dtype, None)
    path = Path(source)
    possible = path.is_dir() and layerwise(path)
    if layers_on_disk and not possible:
        raise ValueError(f"{source} can't be read a layer at a time: that needs a directory of safetensors files")
    if possible and layers_on_disk is not False:
        return Checkpoint(path, spec)
    base, tokenizer = load_base(os.fspath(source), revision=revision)
    dtype = base.dtype
    return LayerSource(_converted(base.float(), spec), dtype, tokenizer)


def _require_own_queries(model: PreTrainedModel) -> None:
    """Refuses a model that was written with refitted queries: its attention in mode "original" is not the base's."""
    report = Path(model.config._name_or_path) / "retrofox.json"
    if not report.is_file():
        return
    if json.loads(report.read_text(encoding="utf-8")).get("calibration", {}).get("rewritten"):
        raise ValueError(
            f"calibration rewrote query projections of {report.parent}, so the original's attention is not in it any "
            f"more: calibrate its base model {model.config.fox.get('base') or ''}".rstrip()
        )


def _converted(base: PreTrainedModel, spec: FoxSpec | None) -> PreTrainedModel:
    return apply(base, make_plan(base.config, spec or FoxSpec(), base=base.config._name_or_path or None))
