"""What of a model cannot run on CUDA, found out before anything of it is loaded."""

from bridge.cuda.attention import attention_kind, latent_attention
from bridge.cuda.forms.matrix import has_kernel

from bridge.errors import BridgeError
from bridge.gguf_file.architectures import KDA
from bridge.runtime.config.decoder_config import DecoderConfig
from bridge.runtime.reader import GGUFFile


def check_supported(file: GGUFFile, config: DecoderConfig, kv: str, precision: str) -> None:
    """Raises BridgeError for a model that no kernels are for, with what can run it."""
    if (reason := _unsupported(file, config, kv, precision)) is not None:
        raise BridgeError(f"{file.path}: {reason} cannot run on CUDA here; the CPU can (device cpu)")


def _unsupported(file: GGUFFile, c: DecoderConfig, kv: str, precision: str) -> str | None:
    """What is not supported."""
    if any(tensor.change is not None for tensor in file.values()):
        return "a model with an adapter (LoRA)"
    if not c.causal:
        return "attention both ways"
    for tensor in file.values():
        weighed = tensor.name.endswith("ffn_down_exps.weight") and not c.routing.before  # by factors times weights
        if len(tensor.shape) == 3 and not weighed and tensor.factors is not None and not has_kernel(tensor[0]):
            return f"{tensor.name}, {tensor.type} with factors,"
    if c.hidden % 32:
        return f"a model of {c.hidden} hidden features, which are not a multiple of 32,"
    if c.recurrent is not None and c.recurrent.kind == KDA:
        return "delta attention whose state decays by channel"
    if c.latent is not None:
        return latent_attention.unsupported(c, kv, precision)
    heads = sorted({(c.query_heads_of(layer), *c.heads_of(layer)[:2]) for layer in c.attending})
    if any(dim % 8 for _, _, dim in heads) or not attention_kind.supported(c, kv):
        return f"{' and '.join(f'{q} heads over {kv_heads} of {dim}' for q, kv_heads, dim in heads)} with kv {kv}"
    return None
