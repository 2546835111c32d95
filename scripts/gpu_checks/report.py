"""The results as a table: bars first, each with its measurement and whether it is met."""

from typing import Any, NamedTuple

from bridge.cuda.product import mma_int8

from gpu_checks.jobs import CACHES, EXPERTS, LARGE, LENGTHS, MANY, MIXTURE, OTHERS, PROMPTED, SMALL, TOKENS, TYPES

OF_READING = {"Q4_K": 85, "Q6_K": 85, "Q8_0": 85, "Q4_0": 85, "Q2_K": 75, "Q3_K": 75, "Q5_K": 75, "Q4_1": 75}  # %
OF_READING_SMALL = 60  # %, Q4_K
TIMES_TORCH = 3.0
BATCH_4 = 1.3  # times batch 1, at most
OF_DECODE = 60  # %
TIMES_DEQUANTIZED = 2.0  # of 16 and 64 tokens, against dequantizing the weights for torch

_NOT_MEASURED, _NOT_RUN = "not measured", "not run"


class Row(NamedTuple):
    """`met` is None where there is no bar, or its jobs were not run."""

    what: str
    bar: str
    measured: str
    met: bool | None
    detail: str


def rows(times: dict[str, dict[str, Any]]) -> list[Row]:
    """The table of times, by names of jobs; a bar whose job failed is not met."""
    times = {job.removeprefix("time/"): result for job, result in times.items()}
    table = [_share(times, type, LARGE, bar) for type, bar in OF_READING.items()]
    table += [_share(times, "Q4_K", SMALL, OF_READING_SMALL), _against_torch(times), _batch(times), _decode(times)]
    table += [_tokens(times)]
    others = [(type, shape) for shape in (LARGE, SMALL) for type in TYPES]
    others += [(type, shape) for shape in OTHERS for type in ("Q4_K", "Q6_K", "Q8_0")]
    barred = [*((type, LARGE) for type in OF_READING), ("Q4_K", SMALL)]
    table += [_share(times, type, shape, None) for type, shape in others if (type, shape) not in barred]
    table += [_decode(times, MIXTURE), *(_prompt(times, type, shape) for type in PROMPTED for shape in MANY)]
    table += [_int8(times, type, shape) for type in mma_int8.TYPES for shape in MANY]
    table += [_experts(times, type) for type in EXPERTS]
    return table + [_attention(times, length, kind) for length in LENGTHS for kind in CACHES]


def _measured(times: dict[str, dict[str, Any]], *jobs: str) -> list[Any]:
    """The result of each job; None for those that failed or were not run."""
    results = [times.get(job, {"failed": ""}) for job in jobs]
    return [None if "failed" in result or "late" in result else result for result in results]


def _without(times: dict[str, dict[str, Any]], jobs: list[str], what: str, bar: str, detail: str = "") -> Row:
    """The row of a bar for which not all jobs have a result."""
    missing = [times.get(job, {}) for job, result in zip(jobs, _measured(times, *jobs), strict=True) if result is None]
    if all("late" in result for result in missing):
        return Row(what, bar, _NOT_RUN, None, detail)
    return Row(what, bar, _NOT_MEASURED, False if bar else None, detail)


def _share(times: dict[str, dict[str, Any]], type: str, shape: str, bar: int | None) -> Row:
    """A product's bytes a second, as a share of plain reading."""
    what, wanted = f"{type} matvec, {shape}", "" if bar is None else f">= {bar}%"
    needed = [f"product/{shape}/{type}", "reading"]
    time, reading, torch = _measured(times, *needed, f"torch_product/{shape}")
    if time is None or reading is None:
        return _without(times, needed, what, wanted)
    share = 100 * time["nbytes"] / time["int8"] / reading["bandwidth"]
    detail = f"{1e6 * time['int8']:.1f} us; floats {1e6 * time['f32']:.1f} us"
    if torch is not None:
        detail += f"; torch f16 {1e6 * torch['seconds']:.1f} us"
    if "mmvq" in time:
        detail += f"; llama.cpp {1e6 * time['mmvq']:.1f} us"
    return Row(what, wanted, f"{share:.1f}% of reading", None if bar is None else share >= bar, detail)


def _attention(times: dict[str, dict[str, Any]], length: str, kind: str) -> Row:
    """Bytes of keys and values a second, as a share of plain reading."""
    what, needed = f"attention, {int(length):,} positions, {kind}", [f"attention/{length}/{kind}", "reading"]
    time, reading = _measured(times, *needed)
    if time is None or reading is None:
        return _without(times, needed, what, "")
    share = 100 * time["nbytes"] / time["seconds"] / reading["bandwidth"]
    detail = f"{1e6 * time['seconds']:.1f} us a layer"
    if "torch" in time:
        detail += f"; torch's, without rotation and storing, {1e6 * time['torch']:.1f} us"
    return Row(what, "", f"{share:.1f}% of reading", None, detail)


def _experts(times: dict[str, dict[str, Any]], type: str) -> Row:
    """Bytes of the chosen experts a second, as a share of plain reading."""
    what, needed = f"8 of 128 experts of {type}, 2048 x 768", [f"experts/{type}", "reading"]
    time, reading = _measured(times, *needed)
    if time is None or reading is None:
        return _without(times, needed, what, "")
    share = 100 * time["nbytes"] / time["seconds"] / reading["bandwidth"]
    detail = f"{1e6 * time['seconds']:.1f} us a layer; the host launches it in {1e6 * time['host']:.1f} us"
    detail += f", expert by expert in {1e6 * time['host, expert by expert']:.1f}"
    return Row(what, "", f"{share:.1f}% of reading", None, detail)


def _against_torch(times: dict[str, dict[str, Any]]) -> Row:
    what, wanted = "Q4_K against torch's f16", f">= {TIMES_TORCH}x"
    needed = [f"product/{LARGE}/Q4_K", f"torch_product/{LARGE}"]
    time, torch = _measured(times, *needed)
    if time is None or torch is None:
        return _without(times, needed, what, wanted, LARGE)
    ratio = torch["seconds"] / time["int8"]
    return Row(what, wanted, f"{ratio:.2f}x", ratio >= TIMES_TORCH, LARGE)


def _batch(times: dict[str, dict[str, Any]]) -> Row:
    """Times of 4 columns over those of one; the largest ratio of all types with a bar counts."""
    what, wanted = f"batch 4 against 1, the worst of {len(OF_READING)} types", f"<= {BATCH_4}x"
    needed = [f"product/{LARGE}/{type}" for type in OF_READING]
    measured = [(type, t) for type, t in zip(OF_READING, _measured(times, *needed), strict=True) if t is not None]
    ratios = {type: (t["int8_4"] / t["int8"], t["int8_8"] / t["int8"]) for type, t in measured}
    detail = "; ".join(f"{type} {four:.2f} (batch 8: {eight:.2f})" for type, (four, eight) in ratios.items())
    if len(ratios) < len(needed):
        return _without(times, needed, what, wanted, detail)
    worst = max(four for four, _ in ratios.values())
    return Row(what, wanted, f"{worst:.2f}x", worst <= BATCH_4, detail)


def _tokens(times: dict[str, dict[str, Any]]) -> Row:
    """Times of dequantizing first over those of tensor cores; the smallest ratio counts."""
    what, wanted = "16 and 64 tokens against dequantized weights", f">= {TIMES_DEQUANTIZED}x"
    needed = [f"tokens/{LARGE}/{type}" for type in TOKENS]
    measured = [(type, t) for type, t in zip(TOKENS, _measured(times, *needed), strict=True) if t is not None]
    ratios = {(type, n): t[f"torch_{n}"] / t[f"cores_{n}"] for type, t in measured for n in (16, 64)}
    detail = "; ".join(
        f"{type} {1e6 * t['cores_16']:.1f} us ({ratios[type, 16]:.2f}), {1e6 * t['cores_64']:.1f} us "
        f"({ratios[type, 64]:.2f})"
        for type, t in measured
    )
    if len(measured) < len(needed):
        return _without(times, needed, what, wanted, detail)
    worst = min(ratios.values())
    return Row(what, wanted, f"{worst:.2f}x", worst >= TIMES_DEQUANTIZED, detail)


def _prompt(times: dict[str, dict[str, Any]], type: str, shape: str) -> Row:
    """The time of torch's f16 product over ours, for the most tokens."""
    what, needed = f"prompts in {type} against torch's f16, {shape}", [f"prompt/{shape}/{type}"]
    (time,) = _measured(times, *needed)
    if time is None:
        return _without(times, needed, what, "")
    counts = [name.removeprefix("own_") for name in time if name.startswith("own_")]
    detail = "; ".join(
        f"{n} tokens {1e6 * time[f'own_{n}']:.0f} us, torch f16 {1e6 * time[f'float16_{n}']:.0f}, "
        f"bf16 {1e6 * time[f'bfloat16_{n}']:.0f}"
        for n in counts
    )
    return Row(what, "", f"{time[f'float16_{counts[-1]}'] / time[f'own_{counts[-1]}']:.2f}x", None, detail)


def _int8(times: dict[str, dict[str, Any]], type: str, shape: str) -> Row:
    """Numbers of tokens for which int8 takes the least time of our ways."""
    what, needed = f"{type} as int8 on tensor cores, {shape}", [f"mma_int8/{shape}/{type}"]
    (time,) = _measured(times, *needed)
    if time is None:
        return _without(times, needed, what, "")
    counts = [name.removeprefix("int8_") for name in time if name.startswith("int8_")]
    fastest = [n for n in counts if time[f"int8_{n}"] < time[f"halves_{n}"]]
    detail = "; ".join(
        f"{n} tokens {1e6 * time[f'int8_{n}']:.0f} us, halves {1e6 * time[f'halves_{n}']:.0f}, torch bf16 "
        f"{1e6 * time[f'bfloat16_{n}']:.0f}"
        for n in counts
    )
    return Row(what, "", f"faster than halves for {', '.join(fastest) or 'no'} tokens", None, detail)


def _decode(times: dict[str, dict[str, Any]], preset: str = "") -> Row:
    """Tokens a second, as a share of the bound that reading the whole file for each token sets; a bar for Q4_K."""
    what, wanted = f"decode, 8B {preset or 'Q4_K'}, batch 1", "" if preset else f">= {OF_DECODE}%"
    needed = [f"decode/{preset}" if preset else "decode", "reading"]
    time, reading = _measured(times, *needed)
    if time is None or reading is None:
        return _without(times, needed, what, wanted)
    speed, bound = time["greedy"]["tokens_per_second"], reading["bandwidth"] / time["file"]
    long = time["greedy, long prompt"]
    detail = (
        f"{speed:.1f} tokens/s of {bound:.1f}, file {time['file'] / 1e9:.2f} GB; step alone "
        f"{1e3 * time['step_seconds']:.3f} ms; sampled {time['sampled']['tokens_per_second']:.1f}; after a long prompt "
        f"{long['tokens_per_second']:.1f}, the prompt in {long['prompt_seconds']:.2f} s; upload {time['upload']:.0f} s"
    )
    if (four := time.get("step_seconds, four tokens")) is not None:
        detail += f"; the step of four tokens {1e3 * four:.3f} ms"
    if (apart := time.get("step_seconds, one after the other")) is not None:
        detail += f"; launches one after the other {1e3 * apart:.3f} ms"
    share = 100 * speed / bound
    return Row(what, wanted, f"{share:.1f}% of bandwidth/size", None if preset else share >= OF_DECODE, detail)


def shown(job: str, result: dict[str, Any]) -> str:
    """A line for a job that has ended."""
    if "failed" in result or "late" in result:
        words = f"FAILED {result['failed']}" if "failed" in result else f"no result: {result['late']}"
        words += f", after {result['cases']} cases" if "cases" in result else ""
        words = "; ".join([words, *result.get("wrong", [])])
    elif "wrong" in result:
        words = f"{'; '.join(result['wrong']) or 'right'}  {result.get('notes', '')}"
    elif "tried" in result:
        fastest = sorted(result["tried"], key=lambda pair: pair[1])[:3]  # of (rows, units, split, warps), and its time
        used, *others = [f"{tried} {1e6 * seconds:.1f}" for tried, seconds in (result["tried"][0], *fastest)]
        words = f"own {used} us; the fastest {'; '.join(others)} us"
    else:
        words = ", ".join(f"{name} {value}" for name, value in result.items())
    return f"{job:<40} {words}"


def printed(results: dict[str, Any], table: list[Row], wrong: list[str]) -> str:
    """The end of the output: wrong results, and the table."""
    checks = results["correctness"].values()
    right = sum(not (job.get("wrong") or "failed" in job or "late" in job) for job in checks)
    lines = ["", f"{results['machine']}. {results['seconds']:.0f} s in all; {right} of {len(checks)} right."]
    lines += [f"FAILED {line}" for line in wrong]
    everything = results["correctness"] | results["times"] | results["sanitized"]
    for reason in dict.fromkeys(everything[job]["late"] for job in results["not_run"]):
        late = [job for job in results["not_run"] if everything[job]["late"] == reason]
        lines.append(f"No result, as {reason}: {', '.join(late)}.")
    if (reading := results["times"].get("time/reading", {}).get("bandwidth")) is not None:
        lines.append(f"Read bandwidth in the same run: {reading / 1e9:.0f} GB/s.")
    lines += ["", "| what | bar | measured | met | in detail |", "|---|---|---|---|---|"]
    words = {True: "yes", False: "no", None: ""}
    lines += [f"| {row.what} | {row.bar} | {row.measured} | {words[row.met]} | {row.detail} |" for row in table]
    return "\n".join(lines)
