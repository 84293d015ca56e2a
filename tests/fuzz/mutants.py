"""Check that the native fuzz targets find bugs: ``python -m tests.fuzz.mutants`` takes checks out of the code, one at a
time, and runs a target until it reports. It needs what ``make fuzz-build`` makes; minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.__main__ import BUILD, ROOT

_SECONDS = 120
_FLAGS = ["-std=c++20", "-O1", "-g", "-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=all"]


@dataclass
class Mutant:
    """A line of the code, and what takes its place."""

    target: str
    file: str
    """The file under ``cpp/src`` that is changed."""
    line: str
    mutated: str
    compiled: tuple[str, ...] = ()
    """The files that are compiled again; by default the changed one."""


MUTANTS = {
    "a ring begins its search at a negative slot": Mutant(
        "ring",
        "lanes/ring.cpp",
        "static_cast<std::int64_t>(static_cast<std::uint64_t>(see(control_->sequence.last)) %\n"
        "                                                 static_cast<std::uint64_t>(count_));",
        "see(control_->sequence.last) % count_;",
    ),
    "a ring's commit number overflows": Mutant(
        "ring",
        "lanes/ring.cpp",
        "wrapping_sum(control_->sequence.last.fetch_add(1, std::memory_order_relaxed), 1)",
        "control_->sequence.last.fetch_add(1, std::memory_order_relaxed) + 1",
    ),
    "weights are read from a buffer that does not exist": Mutant(
        "weights", "lanes/weights.cpp", " && buffer_of(latest) < count_;", ";"
    ),
    "weights are read from a buffer that was checked before it changed": Mutant(
        "scribbler",
        "lanes/weights.cpp",
        "const int index = buffer_of(latest);\n    for (const Part &part : parts)\n        copy_bytes(part.data",
        "const int index = buffer_of(see(control_->latest.value));\n    for (const Part &part : parts)\n        "
        "copy_bytes(part.data",
    ),
    "a link leads to a negative slot": Mutant(
        "replay",
        "lanes/replay.hpp",
        "static_cast<std::int64_t>(static_cast<std::uint64_t>(sequence) % "
        "static_cast<std::uint64_t>(shape_.capacity));",
        "sequence % shape_.capacity;",
        ("lanes/replay.cpp", "lanes/sampler.cpp"),
    ),
    "a search in the sum tree ends in its padding": Mutant(
        "replay", "lanes/sum_tree.cpp", "child < 0 || found[i] * fan_out + child >= size_below", "child < 0"
    ),
    "a row number that is none is claimed": Mutant(
        "replay", "lanes/replay.cpp", "if (!is_sequence(sequence)) {", "if (false) {"
    ),
    "a quorum's count overflows": Mutant(
        "signal", "sync/quorum.hpp", "wrapping_sum(before, count)", "before + count", ("sync/signal.cpp",)
    ),
}


def find(name: str, mutant: Mutant, folder: Path) -> str:
    """Build the target with the mutant and run it. Return how it was found; empty if it was not."""
    sources = folder / "cpp"
    shutil.copytree(ROOT / "cpp", sources, ignore=shutil.ignore_patterns("corpus", "tests", "envs"))
    file = sources / "src" / mutant.file
    text = file.read_text()
    if text.count(mutant.line) != 1:
        raise SystemExit(
            f"{name}: expected this once in {mutant.file}, found {text.count(mutant.line)}:\n{mutant.line}"
        )
    file.write_text(text.replace(mutant.line, mutant.mutated))
    includes = [f"-I{sources}", f"-I{sources / 'src'}", f"-I{sources / 'include'}"]
    objects = []
    for source in (*(f"src/{each}" for each in mutant.compiled or (mutant.file,)), f"fuzz/{mutant.target}.cpp"):
        objects.append(str(folder / f"{len(objects)}.o"))
        subprocess.run(["clang++", *_FLAGS, *includes, "-c", str(sources / source), "-o", objects[-1]], check=True)
    target = str(folder / "target")
    link = ["clang++", "-fsanitize=fuzzer,address,undefined", *objects, str(BUILD / "libmemlane_core.a"), "-pthread"]
    subprocess.run([*link, "-o", target], check=True)
    begin = time.monotonic()
    command = [target, f"-max_total_time={_SECONDS}", "-max_len=256", "-timeout=5", "-seed=1", "-print_final_stats=1"]
    corpus = folder / "corpus"  # for new inputs
    corpus.mkdir()
    done = subprocess.run(
        [*command, f"-artifact_prefix={folder}/", str(corpus), str(ROOT / "cpp" / "fuzz" / "corpus" / mutant.target)],
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if not done.returncode:
        return ""
    found = re.search(r"runtime error: [^\n]*|ERROR: \w+: [^\n]{0,60}|^[a-z_]+: [a-z][^\n]*", done.stderr, re.MULTILINE)
    inputs = re.search(r"number_of_executed_units:\s+(\d+)", done.stderr)
    count = f"{int(inputs[1]):,} inputs" if inputs else "the first inputs"
    return f"{count}, {time.monotonic() - begin:.0f} s: {found[0] if found else done.stderr[-300:]}"


def main() -> int:
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {
            name: pool.submit(find, name, mutant, Path(folder) / str(number))
            for number, (name, mutant) in enumerate(MUTANTS.items())
        }
        for name, run in runs.items():
            how = run.result()
            print(f"{MUTANTS[name].target:10} {name}: {how or 'NOT FOUND'}", flush=True)
            if not how:
                survived.append(name)
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
