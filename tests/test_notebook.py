"""In a notebook: what cells show, a bar that is drawn over, and interrupts, after which the next cell works."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import bridge
from tests.conftest import CHECKPOINT, PATIENCE, ROOT, posix

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks (the extra: test)")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel", reason="the kernel of notebooks")

Run = Callable[..., Awaitable[Any]]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """notebook(steps): awaits steps(run, client); run(code) executes a cell and returns it, with what it shows."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("BRIDGE_PROGRESS")
    folder = tmp_path / "folder"
    folder.mkdir()

    async def execute(steps: Callable[[Run, Any], Awaitable[None]]) -> None:
        file = nbformat.v4.new_notebook()
        client = nbclient.NotebookClient(
            file, timeout=PATIENCE, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )

        async def run(code: str, fails: bool = False) -> Any:
            cell = nbformat.v4.new_code_cell(code)
            file.cells.append(cell)
            if fails:
                cell.metadata.tags = ["raises-exception"]
            return await client.async_execute_cell(cell, len(file.cells) - 1)

        async with client.async_setup_kernel():
            await run(f"import time, bridge; CHECKPOINT = {str(CHECKPOINT)!r}")
            await steps(run, client)

    return lambda steps: asyncio.run(execute(steps))


def streams(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def value(cell: Any) -> str:
    """The text of a cell's last value."""
    (result,) = (output for output in cell.outputs if output.output_type == "execute_result")
    return result.data["text/plain"]


def test_cells_show_short_values_and_one_line_of_progress(notebook, tmp_path):
    async def steps(run: Run, client: Any) -> None:
        cell = await run(
            """
            from bridge.system.progress import Bar
            with Bar("converting") as bar:
                report = bridge.convert(CHECKPOINT, "m.gguf", progress=bar)
            report""".replace("\n            ", "\n")
        )
        shown = streams(cell)
        assert re.match(r"\r(converting: |compiling kernels)", shown)
        assert re.search(r"\rconverting: 2\.\d of 2\.\d MB \(100%\), \d+ s[^\r\n]*\r\n$", shown)
        assert shown.count("\n") == 1
        assert value(cell).startswith("Report('m.gguf', 46 tensors of gptq, ")
        html = cell.outputs[-1].data["text/html"]
        assert html.startswith("<pre>Report(&#x27;m.gguf&#x27;, 46 tensors of gptq, ")
        assert "codes kept" in html
        values = {
            'model = bridge.Model.load("m.gguf"); model': r"Model\('m.gguf', qwen3, 4 layers, context 1024\)",
            '"".join(model.generate("KING", 5, temperature=0))': "' .*'",
            "model.tokenizer": r"Tokenizer\(2048 tokens\)",
            "model.timing": r"Timing\(prompt_tokens=1, [^\n]*\)",
            'bridge.open_gguf("m.gguf")': r"GGUFFile\('m.gguf', 46 tensors, 2.3 MB\)",
            'bridge.open_gguf("m.gguf")["output_norm.weight"]': r"QuantTensor\('output_norm.weight', F32, .*\)",
            "checkpoint = bridge.open_checkpoint(CHECKPOINT); checkpoint": r"Checkpoint\('.*', gptq, 28 .* 2.7 MB\)",
            'checkpoint.read_module("model.layers.0.mlp.up_proj")': r"GroupedTensor\('.*', 4 bits, \[768, 256\]\)",
            'checkpoint.modules["model.layers.0.mlp.up_proj"]': r"ModuleInfo\(name='.*up_proj', .*\)",
            "batch = model.batch(2); reply = batch.add('KING', 3); batch": r"Batch\(2 sequences: .* 1 waiting\)",
            "list(batch); reply": r"Generation\('.*', 3 tokens, length\)",
            "batch.close(); batch": r"Batch\(.*\)",
            'bridge.export("m.gguf", "floats")': r"Exported\('floats', floats, 7.3 MB\)",
            'bridge.repack(CHECKPOINT, "v2", "gptq_v2")': r"Rewritten\('v2', gptq_v2, 2.7 MB\)",
            "bridge.Budget(bpw=4)": r"Budget\(.*bpw=4.*\)",
            'bridge.Calibration(text="a.txt")': r"Calibration\(text='a.txt', .*\)",
            "model.close(); model": r"Model\('m.gguf', .*\)",
        }  # fmt: skip
        for code, expected in values.items():
            text = value(await run(code))
            assert re.fullmatch(expected, re.sub(r"\n\s*", " ", text)), text  # IPython breaks long lines
            assert len(text) < 400
        os_gone = await run('import os; os.remove("m.gguf"); report')
        assert os_gone.outputs[-1].data.keys() == {"text/plain", "text/html"}

    notebook(steps)


def test_the_command_line_runs_in_a_cell_whose_streams_are_no_files(notebook):
    """The kernel's event loop runs meanwhile."""

    async def steps(run: Run, client: Any) -> None:
        cell = await run("import asyncio; from bridge.cli import main; asyncio.get_running_loop().is_running()")
        assert value(cell) == "True"
        cell = await run('main(["convert", CHECKPOINT, "m.gguf"])')
        assert value(cell) == "0"
        assert "wrote m.gguf" in streams(cell)
        assert streams(cell).startswith("\rconvert: starting\r")
        cell = await run('main(["run", "m.gguf", "-p", "KING RICHARD:", "-n", "3"])')
        assert value(cell) == "0"
        assert "KING RICHARD:" in streams(cell)
        assert "generation: " in streams(cell)
        cell = await run('main(["serve", "m.gguf", "--port", "0"])')
        assert (value(cell), "which a notebook's cell cannot" in streams(cell)) == ("2", True)
        cell = await run('main(["inspect", "missing.gguf"])')
        assert (value(cell), "error: missing.gguf: " in streams(cell)) == ("2", True)

    notebook(steps)


@posix
def test_an_interrupted_cell_leaves_a_model_that_works_and_no_half_written_file(notebook, tmp_path):
    folder = tmp_path / "folder"

    async def steps(run: Run, client: Any) -> None:
        async def interrupted(code: str) -> str:
            """What a cell showed that is interrupted once it has shown something."""
            count = len(client.nb.cells)
            running = asyncio.ensure_future(run(code, fails=True))
            while len(client.nb.cells) == count or not client.nb.cells[-1].outputs:
                assert not running.done()
                await asyncio.sleep(0.05)
            await client.km.interrupt_kernel()
            cell = await running
            assert cell.outputs[-1].get("ename") == "KeyboardInterrupt", cell.outputs
            return streams(cell)

        await run("%xmode Minimal")  # IPython's tracebacks fail where an interrupt hits an instruction without a line
        bridge.convert(CHECKPOINT, folder / "m.gguf")
        await run(
            'model = bridge.Model.load("m.gguf"); ask = lambda: "".join(model.generate("KING", 5, temperature=0))'
        )
        reply = value(await run("ask()"))
        await interrupted('while True:\n for piece in model.generate("KING", 200): print(piece, end="", flush=True)')
        assert value(await run("ask()")) == reply
        await interrupted('while True:\n print("."); model.generate_batch(["KING", "GREMIO"], 200)')
        assert value(await run('model.generate_batch(["KING"], 5, temperature=0)[0]')) == reply
        await interrupted('while True:\n print("."); model.logits(list(range(500)))')
        assert value(await run("ask()")) == reply

        files = {path.name for path in folder.iterdir()}
        wait = "def wait(done, total, name):\n  print('.', flush=True)\n  while done: time.sleep(0.01)\n"
        await interrupted(wait + "bridge.convert(CHECKPOINT, 'a.gguf', progress=wait)")
        assert {path.name for path in folder.iterdir()} == files
        await interrupted("while True:\n print('.'); bridge.convert(CHECKPOINT, 'a.gguf', type='Q6_K', force=True)")
        assert {path.name for path in folder.iterdir()} - {"a.gguf"} == files
        rounded = "bridge.convert('floats', 'b.gguf', type='Q4_K', calibrate=bridge.Calibration(None, method='rtn'{}))"
        await run("bridge.export('m.gguf', 'floats'); 0")
        files = {path.name for path in folder.iterdir()}
        await interrupted(wait + rounded.format(", progress=wait"))
        left = {path.name for path in folder.iterdir()} - files
        assert left <= {"b.layers"}  # finished layers, from which the same call goes on
        cell = await run(f"[{rounded.format('')}, bridge.convert(CHECKPOINT, 'a.gguf', force=True)]")
        assert value(cell).count("Report(") == 2
        assert {path.name for path in folder.iterdir()} - files == {"a.gguf", "b.gguf"} - files
        assert bridge.open_gguf(folder / "b.gguf").tensors
        assert value(await run("ask()")) == reply

    notebook(steps)


def test_progress_is_drawn_seldom_in_a_notebook(monkeypatch):
    """A notebook's file keeps all that was drawn."""
    from ipykernel.iostream import OutStream

    from bridge.system.progress import Bar
    from bridge.system.status_line import LINE, StatusLine

    class Stream(OutStream):
        def __init__(self) -> None:
            self.written: list[str] = []

        def write(self, text: str) -> int:
            self.written.append(text)
            return len(text)

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return False

        def __del__(self) -> None: ...

    Stream.__module__ = OutStream.__module__
    now = [1000.0]
    monkeypatch.delenv("BRIDGE_PROGRESS")
    monkeypatch.setattr(StatusLine, "_tick", lambda line, over: None)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream := Stream())
    with Bar("converting", unit=" tensors") as bar:
        for done in range(36_000):  # of an hour
            bar(done, 36_000, f"blk.{done}")
            now[0] += 0.1
            LINE._draw()
    assert 100 < len(stream.written) < 600
    assert "".join(stream.written).count("\n") == 1
