"""Lists the documents of a corpus, one JSON line each, so that anyone can rebuild it and check what they rebuilt.

    python benchmarks/corpus/manifest.py train-00.jsonl.xz dev.jsonl.xz > benchmarks/corpus/manifest.jsonl
    python benchmarks/corpus/manifest.py REBUILT.jsonl --check benchmarks/corpus/manifest.jsonl

Each input line is a document with id, source, title, author, licence, tokens and text; `.xz` files are read as they
are. The manifest's line has the file's name and the sha256 of the text (UTF-8) in place of the text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELDS = ("id", "source", "title", "author", "licence", "tokens")


def documents(file: Path) -> Iterator[dict[str, Any]]:
    """The manifest's line of every document in a file.

    Raises:
        ValueError: a document lacks a field.
    """
    with (lzma.open if file.suffix == ".xz" else open)(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            record = json.loads(line)
            missing = [field for field in (*FIELDS, "text") if field not in record]
            if missing:
                raise ValueError(f"{file.name}, line {number}: no {', '.join(missing)}; a document has them all")
            digest = hashlib.sha256(record["text"].encode()).hexdigest()
            yield {"file": file.name.split(".")[0], **{field: record[field] for field in FIELDS}, "sha256": digest}


def check(files: list[Path], manifest: Path) -> list[str]:
    """What is wrong with rebuilt files: documents whose text differs from the manifest's, or that it doesn't list."""
    listed = {row["id"]: row["sha256"] for row in map(json.loads, manifest.read_text(encoding="utf-8").splitlines())}
    problems = []
    for row in (row for file in files for row in documents(file)):
        if row["id"] not in listed:
            problems.append(f"{row['id']}: not in the manifest")
        elif row["sha256"] != listed[row["id"]]:
            problems.append(f"{row['id']}: another text")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines, .xz or plain")
    parser.add_argument("--check", type=Path, help="a manifest to compare with, instead of printing one")
    options = parser.parse_args()
    if options.check is not None:
        problems = check(options.files, options.check)
        print("\n".join(problems) or "every document is the manifest's")
        sys.exit(bool(problems))
    for file in options.files:
        for row in documents(file):
            print(json.dumps(row, ensure_ascii=False, separators=(",", ":")))


if __name__ == "__main__":
    main()
