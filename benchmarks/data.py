"""Tokens per second of `retrofox prepare` against the bare tokenizer's own batch call on the same texts.

    python benchmarks/data.py TOKENIZER [--copies 16] [--rounds 3]     TOKENIZER: Hub id, directory or .gguf file

Prepare reads JSONL, tokenises, checks, hashes and writes shards to disk with fsync; the bare call only tokenises texts
that are in memory already. Rounds alternate, the median ratio is reported: other load on the machine hits both. Also
measured: planning the windows of a million documents, and reading packed windows. Writes benchmarks/data.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from provenance import provenance

from retrofox.data.order import StepSampler
from retrofox.data.pack import pack
from retrofox.data.packed import PackedDataset, collate
from retrofox.data.shards import prepare_sources
from retrofox.data.sources import DataSource
from retrofox.loading.tokenizers import load_tokenizer

HERE = Path(__file__).parent
BOOKS = HERE.parent / "examples" / "data" / "train"


def chapters(copies: int) -> list[str]:
    """Documents of 1 to 60 kB cut from the example books at paragraphs; each copy is cut elsewhere."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(copies):
        for path in sorted(BOOKS.glob("*.txt")):
            paragraphs = path.read_text(encoding="utf-8").split("\n\n")
            while paragraphs:
                count = int(rng.integers(2, 120))
                found.append("\n\n".join(paragraphs[:count]))
                paragraphs = paragraphs[count:]
    return [text for text in found if text.strip()]


def timed(call, *arguments, **options):
    """Seconds a call took, and its result."""
    started = time.perf_counter()
    result = call(*arguments, **options)
    return time.perf_counter() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    texts = chapters(options.copies)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "texts.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        for number in range(options.rounds):
            wall, ids = timed(lambda: tokenizer(texts, verbose=False)["input_ids"])
            count = sum(map(len, ids)) + len(ids)
            del ids
            again, _ = timed(tokenizer.backend_tokenizer.encode_batch, texts)
            mine, manifest = timed(
                prepare_sources, [DataSource(str(source))], tokenizer, Path(folder) / str(number), progress=False
            )
            assert manifest.tokens == count
            rounds.append({"tokenizer_s": wall, "encode_batch_s": again, "prepare_s": mine})
            print({key: round(value, 2) for key, value in rounds[-1].items()}, flush=True)
        data = PackedDataset(manifest, 4096)
        batches = iter(StepSampler(data.order, 4))
        reading, _ = timed(lambda: [collate([data[i] for i in next(batches)]) for _ in range(50)])
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1.3, 1_000_000), 1, 200_000).astype(np.int64)
    planning, plan = timed(pack, np.concatenate([[0], np.cumsum(lengths)]), 4096)
    result = {
        **provenance(),
        "load": round(os.getloadavg()[0], 1),
        "tokens": manifest.tokens,
        "bytes": sum(len(text.encode()) for text in texts),
        "documents": len(texts),
        "rounds": rounds,
        "prepare_tokens_per_s": manifest.tokens / min(item["prepare_s"] for item in rounds),
        "tokenizer_tokens_per_s": manifest.tokens / min(item["tokenizer_s"] for item in rounds),
        "ratio_to_tokenizer": statistics.median(item["tokenizer_s"] / item["prepare_s"] for item in rounds),
        "ratio_to_encode_batch": statistics.median(item["encode_batch_s"] / item["prepare_s"] for item in rounds),
        "read_tokens_per_s": 50 * 4 * 4096 / reading,
        "fill_4096": data.fill,
        "plan_million_documents_s": planning,
        "plan_million_fill": plan.tokens / (len(plan) * 4096),
    }
    (HERE / "data.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
