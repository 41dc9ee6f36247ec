"""convert: retrofits forget gates into a model in memory or a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from retrofox.conversion.artefact import check_texts, plan_for, write
from retrofox.conversion.measured import is_measured, set_measured
from retrofox.data.sources import Text
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.tokenizers import tokenizer_of_live
from retrofox.surgery import apply


def convert(
    source: str | Path | PreTrainedModel,
    out: str | Path | None = None,
    *,
    fox: FoxSpec | dict[str, Any] | None = None,
    verify: bool = True,
    revision: str | None = None,
    texts: Sequence[Text] = (),
) -> Any:
    """Retrofits forget gates into a pretrained model.

    Args:
        source: a live transformers model, a Hub id, a local directory or a .gguf file.
        out: directory to write; None returns the converted model instead.
        fox: what to convert to, or the fields of it that a recipe would have; None = FoxSpec(): stretched RoPE,
            data-dependent gates on a ladder of half-lives, one sink token.
        verify: prove on the written artefact, in a fresh process, that gates open + RoPE kept is the base model.
        revision: Hub revision of `source`.
        texts: to measure the heads on with init "measured": files, globs, hf:...

    Returns:
        The converted model, sharing the tensors of a live `source` (out is None), or the report that is also written
        to retrofox.json in `out`: plan, seconds, peak memory, parity proof.

    Raises:
        ValueError: unsupported family, already converted, quantised, an adapter, or `out` exists.
        FileNotFoundError: `source` is not there.
    """
    spec = fox if isinstance(fox, FoxSpec) else FoxSpec.from_dict(fox or {})
    texts = [texts] if isinstance(texts, (str, Path)) else texts
    if out is not None:
        return write(source, Path(out), spec, verify=verify, revision=revision, texts=texts)
    if spec.version is None:  # a spec with a version says how a model was converted
        check_texts(spec, texts)
    plan = plan_for(source, spec, revision)
    if plan.own_gates is not None:
        raise ValueError(f"{source} has forget gates of its own: convert it into a directory (give OUT) and load that")
    base, tokenizer = (source, None) if isinstance(source, PreTrainedModel) else load_base(source, revision=revision)
    model = apply(base, plan)
    if is_measured(plan) and not model.get_input_embeddings().weight.is_meta:  # type: ignore[union-attr]
        set_measured(model, plan, tokenizer or tokenizer_of_live(base), texts)
    return model
