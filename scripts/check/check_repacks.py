"""Programs that load repacked checkpoints on a CPU, and whether they compute what the source says.

    python -m scripts.check.check_repacks SOURCE ... [--only PROGRAM] [--format FORMAT] [--for] [--path PROGRAM=FOLDER]

Each source, a quantized checkpoint, is repacked in the formats that a program reads; with --for, for that program.
Printed are what became of the layers and the KL divergence, in nats a token, of the program's logits from those that
transformers computes, in float32, of the source as floats. The tokens are random. Programs run as in check_exports;
--path names a folder of packages for one that needs its own. A program that can read the source is also given that, "as
it is".
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import bridge
from bridge.checkpoint import open_checkpoint
from bridge.conversion.checkpoints.repack import Repacked
from bridge.errors import BridgeError
from scripts.benchlib import Lines, bench, option
from scripts.check.programs import divergence_or_error, run

# a program -> the formats that it reads
READS = {
    "transformers": ("floats", "compressed-tensors", "awq", "gptq", "gptq_v2"),
    "gptqmodel": ("gptq", "gptq_v2", "gptq_p", "awq"),
    "mlx-lm": ("mlx",),
    "vllm": ("floats", "compressed-tensors", "gptq", "gptq_v2", "awq"),
}
HOSTS = {"mlx-lm": "mlx"} | {name: name for name in ("transformers", "vllm")}  # as --for has them
AS_IT_IS = "as it is"

OPTIONS = (
    option("sources", metavar="SOURCE", nargs="+"), option("--length", 64),
    option("--only", choices=[*READS], help="a program", action="append"),
    option("--format", help="a format", action="append"),
    option("--for", False, help="names, bits and groups that the program reads"),
    option("--path", metavar="PROGRAM=FOLDER", help="packages of a program", action="append", default=[]),
)  # fmt: skip


def measure(options: argparse.Namespace) -> Lines:
    paths = dict(pair.split("=", 1) for pair in options.path)
    with tempfile.TemporaryDirectory(prefix="gguf-bridge-repacks-") as folder:
        scratch = Path(folder)
        references = reference_logits(options.sources, scratch, options.length, paths.get("transformers"))
        for program in options.only or READS:
            formats = [f for f in (*READS[program], AS_IT_IS) if options.format is None or f in options.format]
            hows: dict[Path, tuple[str, ...]] = {}
            for source in map(Path, options.sources):
                for format in formats:
                    if (written := repacked(source, format, program, scratch, vars(options)["for"])) is not None:
                        hows[written[0]] = source.name, format, written[1]
            readable = [case for case in hows if case.exists()]
            for tokens in sorted({references[hows[case][0]] for case in readable}):
                group = [case for case in readable if references[hows[case][0]] == tokens]
                stderr = run(program, group, tokens, paths.get(program))
                for case in group:
                    reference = scratch / f"{hows[case][0]}-exact.npy"
                    yield program, *hows[case], divergence_or_error(case, reference, stderr)
            for case in hows.keys() - set(readable):
                yield program, *hows[case], "not written"


def reference_logits(sources: list[str], scratch: Path, length: int, packages: str | None) -> dict[str, Path]:
    """The file of tokens of each source, by its name; its logits are in SOURCE-exact.npy."""
    files: dict[str, Path] = {}
    folders: dict[Path, list[Path]] = {}
    for source in map(Path, sources):
        with open_checkpoint(source) as ckpt:
            vocab = int(ckpt.config.get("text_config", ckpt.config)["vocab_size"])
        file = scratch / f"tokens-{vocab}.npy"
        np.save(file, np.random.default_rng(0).integers(3, vocab, length))
        bridge.repack(source, exact := scratch / f"{source.name}-exact", "floats", dtype="F32")
        files[source.name] = file
        folders.setdefault(file, []).append(exact)
    for file, group in folders.items():
        stderr = run("transformers", group, file, packages)
        for exact in group:
            if not exact.with_name(f"{exact.name}.npy").exists():
                raise BridgeError(f"{exact}: transformers computes nothing: {stderr}")
    return files


def repacked(source: Path, format: str, program: str, scratch: Path, host: bool) -> tuple[Path, str] | None:
    """The folder of a checkpoint for a program, and what became of its layers, or why there is none.

    None for a source as it is that the program does not read."""
    with open_checkpoint(source) as ckpt:
        method = str(ckpt.quant.method)
    if format == AS_IT_IS:
        if method not in READS[program]:
            return None
        folder = scratch / f"{source.name}-itself-{method}"
        if not folder.exists():
            folder.symlink_to(source.resolve())
        return folder, ""
    folder = scratch / f"{source.name}-{program if host else ''}-{format}"
    try:
        done = bridge.repack(source, folder, format, host=HOSTS.get(program) if host else None, force=True)
    except BridgeError as error:
        return folder, str(error).partition(": ")[2]
    if not isinstance(done, Repacked):
        return folder, done.facts()[0][1]
    return folder, ", ".join(sorted({f"{t.how}, {t.bits} bits" for t in done.tensors if t.bits})) or "floats"


if __name__ == "__main__":
    bench(__doc__, OPTIONS, measure, ("program", "source", "format", "layers", "KL divergence"))
