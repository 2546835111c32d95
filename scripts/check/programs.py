"""Programs that load checkpoints on a CPU, each in a process of its own, and the logits that they compute."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.peers.predictions import mean_kl

# a program -> how it is made ready, and a function from the folder of a model to logits [tokens, vocab]
PROGRAMS = {
    "transformers": """
import transformers
def logits_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    images = hasattr(config, "vision_config")
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    dtype = torch.float16 if folder.endswith(("awq", "gptq", "gptq_v2", "gptq_p")) else torch.float32
    model, loaded = auto.from_pretrained(folder, dtype=dtype, device_map="cpu", output_loading_info=True)
    lost = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in loaded[kind]]
    if lost:
        raise ValueError(f"{len(lost)} tensors do not fit the model: {str(min(map(str, lost)))}")
    return model.eval()(ids).logits[0].float().numpy()
""",
    "gptqmodel": """
from gptqmodel import GPTQModel, BACKEND
def logits_of(folder):
    backend = BACKEND.AWQ_TORCH if folder.endswith("awq") else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(folder, backend=backend, device="cpu", dtype=torch.float16)
    return model.model.eval()(ids).logits[0].float().numpy()
""",
    "autoawq": """
from awq import AutoAWQForCausalLM
def logits_of(folder):
    model = AutoAWQForCausalLM.from_quantized(folder, fuse_layers=False, device_map="cpu")
    return model(ids).logits[0].float().numpy()
""",
    "mlx-lm": """
import mlx.core as mx
from mlx_lm import load
mx.set_default_device(mx.cpu)
def logits_of(folder):
    model, _ = load(folder)
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))
""",
    "hqq": """
from hqq.models.hf.base import AutoHQQHFModel
from safetensors.torch import load_file
class Safetensors(AutoHQQHFModel):  # HQQ writes such files, for vLLM, but reads those of torch.save only
    @classmethod
    def get_weight_file(cls, folder):
        return folder + "/model.safetensors"
    @classmethod
    def load_weights(cls, folder, device):
        modules = {}
        for name, values in load_file(cls.get_weight_file(folder)).items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = values
        modules.setdefault("lm_head", modules["model.embed_tokens"])
        return modules
def logits_of(folder):
    model = Safetensors.from_quantized(folder, compute_dtype=torch.float32, device="cpu").eval()
    return model(ids).logits[0].float().numpy()
""",
    "vllm": """
import os
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.quantization import auto_gptq
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel as Kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32 as unpacked
def dequantize(kernel, layer):
    codes, scales, packed_zeros = kernel._get_weight_params(layer)[:3]
    kind = kernel.config.weight_type
    zeros = kind.bias if packed_zeros is None else unpacked(packed_zeros, kind, 1).repeat_interleave(
        len(codes) * 32 // kind.size_bits // len(packed_zeros), 0)
    codes = unpacked(codes, kind, 0) - zeros
    layer.floats = (codes * scales.float().repeat_interleave(len(codes) // len(scales), 0)).to(scales.dtype)
def multiply(kernel, layer, x, bias=None):
    return x @ layer.floats if bias is None else x @ layer.floats + bias
def logits_of(folder):
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):  # which a CPU without AVX-512 lacks: PyTorch multiplies
        auto_gptq.verify_marlin_supported = lambda **_: None
        Kernel.can_implement = classmethod(lambda cls, config: (True, None))
        Kernel._process_gptq_weights_w4a16, Kernel.apply_weights = dequantize, multiply
    model = LLM(folder, dtype="float16", enforce_eager=True, max_model_len=256, max_logprobs=-1,
                logprobs_mode="raw_logits", limit_mm_per_prompt={"image": 0, "video": 0})
    asked = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    said = model.generate([{"prompt_token_ids": tokens + tokens[:1]}], asked)[0].prompt_logprobs[1:]
    return np.array([[step[i].logprob for i in range(len(step))] for step in said], np.float32)
""",
}
_FIRST = """
import sys
import numpy as np
tokens = np.load(sys.argv[1]).tolist()
if {torch}:
    import torch
    torch.set_grad_enabled(False)
    ids = torch.tensor([tokens])
"""
_LAST = """
if __name__ == "__main__":
    for folder in sys.argv[2:]:
        try:
            np.save(folder + ".npy", logits_of(folder))
        except Exception as error:
            with open(folder + ".error", "w") as file:
                file.write(f"{type(error).__name__}: {error}")
"""


def run(program: str, folders: Sequence[Path], tokens: Path, packages: str | None) -> str:
    """Let a program compute the logits of checkpoints, FOLDER.npy or FOLDER.error; its stderr.

    tokens    the file of their ids
    packages  a folder with the program's own
    """
    for folder in folders:
        for suffix in (".npy", ".error"):
            Path(f"{folder}{suffix}").unlink(missing_ok=True)
    script = tokens.with_name("program.py")
    script.write_text(_FIRST.format(torch=program not in ("mlx-lm", "vllm")) + PROGRAMS[program] + _LAST)
    search_path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, str(script), str(tokens), *map(str, folders)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search_path}, capture_output=True, text=True).stderr


def divergence_or_error(folder: Path, reference: Path, stderr: str) -> str:
    """The KL divergence of a program's logits of a checkpoint from those in a file, or the error."""
    out = Path(f"{folder}.npy")
    if out.exists():
        return f"{mean_kl(np.load(reference), np.load(out)):.1e}"
    error = Path(f"{folder}.error")
    text = error.read_text(encoding="utf-8") if error.exists() else last_error(stderr)
    return " ".join(text.split())[:200]


def last_error(stderr: str) -> str:
    """The last error of a program that ended before it computed anything."""
    errors = [text for text in stderr.splitlines() if "Error" in text and not text.startswith(" ")]
    return (errors or stderr.splitlines() or ["no logits"])[-1]
