"""Batches per second of the input side alone: order, chunk reads, gather. No devices, no Ray.

    python benchmarks/stream.py [--quick] [--json] [--rows-per-s N]

Prepared data is written once to a folder and once to the embedded Cloud Storage, and read as one host of two reads it.
``--rows-per-s`` is what the training loop takes (see ``benchmarks/train.py``); the headroom is against that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpupipe.data.chunks import ChunkReader, Manifest, ManifestUnit, UnitFooter, decode_footer, encode_unit, to_table
from tpupipe.data.stream import Stream, digest
from tpupipe.local.server import embedded_store
from tpupipe.stop import terminated_as_interrupted
from tpupipe.store.layout import RunPaths
from tpupipe.store.objects import Store, open_store

STAGE = "tokens"
ROW_BYTES = 129
CHUNK_ROWS = 256
CHUNKS_PER_UNIT = 16
HOSTS = 2
ONE_CASE_S = 10.0


def prepare(store: Store, paths: RunPaths, units: int) -> Manifest:
    """Writes ``units`` units of random rows ``tokens: uint8[129]``, as a ``Preprocess`` stage would."""
    random = np.random.default_rng(0)
    written = []
    schema = None
    for index in range(units):
        name = f"{index:06d}-bench"
        rows = random.integers(32, 127, (CHUNK_ROWS * CHUNKS_PER_UNIT, ROW_BYTES), np.uint8)
        table = to_table({"tokens": rows})
        schema = table.schema
        data = encode_unit(table, chunk_rows=CHUNK_ROWS, footer=UnitFooter(name))
        store.create(paths.unit(STAGE, name), data)
        footer = decode_footer(data)
        written.append(ManifestUnit(name, footer.rows, footer.chunks, len(data)))
    return Manifest(STAGE, tuple(written), schema)


def measure(store: Store | None, paths: RunPaths, manifest: Manifest, batch_size: int, seconds: float) -> float:
    """Batches per second of one host's part, for at most one pass over the data.

    Args:
        store: Where the chunks are; ``None`` measures the order alone.
        paths: The run.
        manifest: What was written.
        batch_size: Rows of a global batch.
        seconds: When to stop.
    """
    stream = Stream(manifest.chunk_rows, 0, batch_size, epochs=1)
    reader = None if store is None else ChunkReader(store, paths, manifest)
    mine = batch_size // HOSTS
    began = time.perf_counter()
    done = 0
    for step in range(stream.steps):
        index = stream.batch(step, 0, mine)
        if reader is not None:
            reader.rows(index.chunk, index.row)
        digest(step, index.position, index.sample_id, index.mask)
        done += 1
        if time.perf_counter() - began > seconds:
            break
    return done / (time.perf_counter() - began)


def measure_all(batch_sizes: Sequence[int], units: int, seconds: float, rows_per_s: float) -> list[dict[str, Any]]:
    """Every batch size with the order alone, from a folder and from the embedded Cloud Storage."""
    results = []
    paths = RunPaths("bench", "stream")
    with tempfile.TemporaryDirectory(prefix="tpupipe-bench-") as folder, embedded_store(Path(folder)) as endpoint:
        stores = {
            "folder": open_store(f"file://{folder}/files"),
            "embedded gs": open_store("gs://bench/stream", endpoint=endpoint),
        }
        manifests = {name: prepare(store, paths, units) for name, store in stores.items()}
        for batch_size in batch_sizes:
            for name, store in {"order alone": None, **stores}.items():
                manifest = manifests.get(name, manifests["folder"])
                rate = measure(store, paths, manifest, batch_size, seconds)
                results.append(
                    {
                        "from": name,
                        "batch_size": batch_size,
                        "batches_per_s": round(rate, 1),
                        "rows_per_s": round(rate * batch_size),
                        "headroom": round(rate * batch_size / rows_per_s, 1),
                    }
                )
    return results


def table(results: Sequence[dict[str, Any]], rows_per_s: float) -> str:
    """The same for people."""
    lines = [
        f"{'from':14}{'batch':>7}{'batches/s':>12}{'rows/s':>12}{'headroom':>11}",
        *(
            f"{r['from']:14}{r['batch_size']:>7}{r['batches_per_s']:>12,.1f}{r['rows_per_s']:>12,}{r['headroom']:>10,.0f}x"
            for r in results
        ),
        f"Headroom is against a training loop of {rows_per_s:g} rows/s.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--quick", action="store_true", help="less data, one batch size")
    parser.add_argument("--rows-per-s", type=float, default=115.0, help="what the training loop takes")
    options = parser.parse_args()
    sizes, units, seconds = ((32,), 4, 3.0) if options.quick else ((32, 256, 2048), 24, ONE_CASE_S)
    with terminated_as_interrupted():
        results = measure_all(sizes, units, seconds, options.rows_per_s)
    if options.json:
        text = json.dumps({"rows_per_s_needed": options.rows_per_s, "cases": results})
    else:
        text = table(results, options.rows_per_s)
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
