"""What the framework costs: a FedMuscle cell against a bare PyTorch loop that does the same work.

Run: `python benchmarks/cell_overhead.py [SUITE]`. Both do the same local steps, embeddings, losses, alignment steps
and evaluations with the same nets, data and batch sizes, on one thread, in turns in one process; the bare loop has no
messages, codec, metering, checkpoints or result files. Prints the median of the ratios (target: at most 1.05), of
wall time and, since neighbours disturb that, of processor time too, and the cost of one exchange (target: below 0.5
ms).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedbench.cache import Cache
from fedbench.discovery import discover
from fedbench.method import ServerProgram
from fedbench.plan import Cell, make_cell
from fedbench.provenance import collect
from fedbench.rounds import CellRun, Surroundings
from fedbench.specs import parse_method
from fedbench.store import Store
from fedbench.suite import load
from fedbench.user import UserHost
from fedbench_plugins.engines.local import LocalEngine

OVERRIDES = ["rounds=1", "steps=50", "iterations=75"]
TURNS = 5


def build(cell: Cell, folder: Path) -> tuple[CellRun, LocalEngine, ServerProgram]:
    around = Surroundings(registry=discover(), cache=Cache(), device=torch.device("cpu"), provenance=collect(sys.argv))
    store = Store(folder)
    place = store.cell("benchmark", "mini", "fedmuscle", {}, cell.seed, cell.key)
    place.path.mkdir(parents=True, exist_ok=True)
    run = CellRun(cell, place, around)
    engine, server = run._build()
    assert isinstance(engine, LocalEngine)
    return run, engine, server


def clock() -> np.ndarray:
    """Wall time and this process's processor time, in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def with_fedbench(cell: Cell, folder: Path) -> np.ndarray:
    """Seconds of the rounds, checkpoints and evaluations of a cell."""
    run, engine, server = build(cell, folder)
    started = clock()
    for r in range(run.protocol.rounds):
        run._round(r, lambda r=r: server.round(r))  # type: ignore[misc]
        run._checkpoint(engine, server)
    run._round(run.protocol.rounds, server.finish)
    run.federation.evaluate("test")
    return clock() - started


def codec_milliseconds(cell: Cell, repeats: int = 200) -> float:
    """Encoding and decoding the messages and replies of one alignment exchange, whole federation."""
    from fedbench.messages import decode, encode

    protocol, users = cell.suite.protocol, len(cell.suite.users)
    z = torch.randn(protocol.batch, protocol.dimension)
    message = {"others": torch.stack([z] * protocol.others), "next": torch.arange(protocol.batch)}
    started = time.perf_counter()
    for _ in range(repeats):
        for _ in range(users):
            decode(encode(message))
            decode(encode({"loss": 1.0, "z": z}))
    return (time.perf_counter() - started) / repeats * 1e3


def bare(cell: Cell, hosts: list[UserHost]) -> np.ndarray:
    """Seconds of the same work, written as one would without a framework."""
    protocol = cell.suite.protocol
    participants = [host.program.participant for host in hosts]
    examiners = [host._examiner for host in hosts]
    loss_of = discover().create("loss", "muscle")
    fits, aligns = [], []
    for one in participants:
        everything = [*one.representation.parameters(), *one.head.parameters()]
        fits.append(torch.optim.AdamW([p for p in everything if p.requires_grad], lr=one.spec.fit_rate, fused=True))
        own = [p for p in one.representation.parameters() if p.requires_grad]
        aligns.append(torch.optim.AdamW(own, lr=one.spec.align_rate, fused=True))

    def predict(one: Any, x: torch.Tensor) -> torch.Tensor:
        features = one.representation.backbone(x)
        if protocol.head == "embedding":
            features = one.representation.projection(features)
        return one.head(features)  # type: ignore[no-any-return]

    def fit() -> None:
        for one, optimizer in zip(participants, fits, strict=True):
            size = min(protocol.fit_batch, len(one.train))
            for _ in range(protocol.steps):
                rows = torch.randint(len(one.train), (size,))
                x = one.train.rows(rows, torch.randint(one.train.views, (size,)))
                loss = one.task.loss(predict(one, x), one.train.targets(rows))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    @torch.inference_mode()
    def evaluate(split: str) -> None:
        for one, examiner in zip(participants, examiners, strict=True):
            data = getattr(examiner, split)
            steps = range(0, len(data), protocol.eval_batch)
            pieces = [torch.arange(start, min(start + protocol.eval_batch, len(data))) for start in steps]
            scores = one.task.scores(torch.cat([predict(one, data.rows(piece, 0)) for piece in pieces]))
            examiner.metric(scores, data.samples.targets)

    started = clock()
    for _ in range(protocol.rounds):
        fit()
        evaluate("validation")
        for _ in range(protocol.iterations):
            batch = torch.randperm(len(participants[0].public))[: protocol.batch]
            z = [one.representation(one.public.rows(batch, 0)) for one in participants]
            others = [row.detach() for row in z]
            for n, optimizer in enumerate(aligns):
                picked = torch.randperm(len(z) - 1)[: protocol.others].tolist()
                rest = torch.stack([others[m + (m >= n)] for m in picked])
                loss = loss_of(z[n], rest)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    fit()
    evaluate("validation")
    evaluate("test")
    return clock() - started


def main() -> None:
    suite = load(sys.argv[1] if len(sys.argv) > 1 else "setup1", overrides=OVERRIDES)
    cell = make_cell(suite, discover(), parse_method("fedmuscle"), 0, "cpu")
    torch.set_num_threads(suite.protocol.threads)
    torch.set_flush_denormal(True)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            hosts = list(build(cell, Path(folder) / f"bare{turn}")[1]._users.values())
            runs = [lambda: bare(cell, hosts), lambda: with_fedbench(cell, Path(folder) / f"cell{turn}")]  # noqa: B023
            # Who goes first changes, so that a machine that warms up or slows down favours neither.
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            taken = {which: runs[which]() for which in order}
            ratios.append(taken[1] / taken[0])
            print(
                f"turn {turn}: cell {taken[1][0]:.2f} s, bare loop {taken[0][0]:.2f} s, ratio {ratios[-1][0]:.3f} "
                f"(processor time {ratios[-1][1]:.3f})",
                flush=True,
            )
    wall, processor = np.median(ratios, axis=0)
    print(f"median ratio {wall:.3f}, of processor time {processor:.3f} (target: at most 1.05)")
    exchange = statistics.median(codec_milliseconds(cell) for _ in range(TURNS))
    print(f"codec of one exchange, {len(suite.users)} users: {exchange:.2f} ms (target: below 0.5)")


if __name__ == "__main__":
    main()
