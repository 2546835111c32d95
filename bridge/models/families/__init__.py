"""The known families. Where an architecture's name stands for several, the first that is chosen."""

from bridge.models.families.afmoe import AFMOE
from bridge.models.families.apertus import APERTUS
from bridge.models.families.arcee import ARCEE
from bridge.models.families.bailing import BAILING_MOE, BAILING_MOE2
from bridge.models.families.bert import BERT, ROBERTA
from bridge.models.families.bitnet import BITNET
from bridge.models.families.command_r import COHERE2, COHERE2_MOE, COMMAND_R
from bridge.models.families.deepseek import DEEPSEEK2, DEEPSEEK32, GLM4_MOE_LITE, GLM5, YOUTU
from bridge.models.families.deepseek4 import DEEPSEEK4
from bridge.models.families.dflash import DFLASH
from bridge.models.families.dots3_note import DOTS3_NOTE
from bridge.models.families.eagle3 import EAGLE3
from bridge.models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from bridge.models.families.exaone4 import EXAONE4
from bridge.models.families.exaone_moe import EXAONE_MOE
from bridge.models.families.falcon_h1 import FALCON_H1
from bridge.models.families.gemma import GEMMA2, GEMMA3, GEMMA_EMBEDDING
from bridge.models.families.gemma3n import GEMMA3N
from bridge.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from bridge.models.families.gemma4_assistant import GEMMA4_ASSISTANT, GEMMA4_UNIFIED_ASSISTANT
from bridge.models.families.glm4 import DOTS1, GLM4, GLM4_MOE, GLM4V_MOE, SOLAR_OPEN
from bridge.models.families.glm5_next import GLM5_NEXT
from bridge.models.families.gpt2 import GPT2
from bridge.models.families.gpt_oss import GPT_OSS
from bridge.models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE
from bridge.models.families.granite_swa import GRANITE_MOE_SWA, GRANITE_SWA
from bridge.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE, HY3
from bridge.models.families.hy_v4 import HY_V4
from bridge.models.families.jais2 import JAIS2
from bridge.models.families.jamba import JAMBA
from bridge.models.families.jina import JINA2, JINA3, PUBLISHED_JINA3
from bridge.models.families.kimi_linear import KIMI_K3, KIMI_LINEAR
from bridge.models.families.laguna import LAGUNA
from bridge.models.families.lfm2 import LFM2, LFM2_MOE
from bridge.models.families.ling3 import LING3
from bridge.models.families.llama import LLAMA, SEED_OSS, SMOLLM3
from bridge.models.families.llama4 import LLAMA4
from bridge.models.families.mamba2 import MAMBA2
from bridge.models.families.mellum import MELLUM
from bridge.models.families.mimo import MIMO2
from bridge.models.families.minicpm import MINICPM
from bridge.models.families.minimax import MINIMAX_M2, MINIMAX_M3
from bridge.models.families.mistral import MISTRAL, MISTRAL3, MIXTRAL
from bridge.models.families.mistral4 import MISTRAL4
from bridge.models.families.modern_bert import MODERN_BERT, NOMIC_BERT, NOMIC_BERT_MOE, PUBLISHED_NOMIC_BERT
from bridge.models.families.muse_glimmer import MUSE_GLIMMER
from bridge.models.families.nemotron_h import NEMOTRON_H, NEMOTRON_H_MOE
from bridge.models.families.olmo import OLMO2, OLMO3, OLMOE
from bridge.models.families.phi import PHI3, PHIMOE
from bridge.models.families.plamo3 import PLAMO3
from bridge.models.families.qwen import QWEN2, QWEN2_MOE, QWEN2_VL, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_VL_MOE
from bridge.models.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from bridge.models.families.qwen4_exp import QWEN4_EXP
from bridge.models.families.starcoder2 import STARCODER2
from bridge.models.families.step35 import STEP35

# EAGLE-3 before Llama, and Jina's before BERT and RoBERTa, whose names they may have
ALL = (
    EAGLE3, LLAMA, LLAMA4, MISTRAL, MIXTRAL, MISTRAL4, MISTRAL3, PHIMOE, QWEN2, QWEN2_MOE, QWEN2_VL, QWEN3, QWEN3_MOE,
    QWEN3_VL, QWEN3_VL_MOE, QWEN3_NEXT, SMOLLM3, GRANITE, PHI3, GEMMA2, GEMMA_EMBEDDING, GEMMA3, GEMMA3N, GEMMA4,
    GLM4, GLM4_MOE, OLMO2, COMMAND_R, STARCODER2, GPT2, DEEPSEEK2, GPT_OSS, BITNET, QWEN3_5, QWEN3_5_MOE, SEED_OSS,
    OLMO3, EXAONE4, ERNIE4_5, ERNIE4_5_MOE, GRANITE_MOE, LFM2, LFM2_MOE, HUNYUAN, HUNYUAN_MOE, HY_V4, MINIMAX_M2,
    MINIMAX_M3, GLM4_MOE_LITE, GLM4V_MOE, GRANITE_HYBRID, NEMOTRON_H_MOE, NEMOTRON_H, MAMBA2, JAMBA, FALCON_H1,
    DEEPSEEK32, GLM5, APERTUS, DEEPSEEK4, SOLAR_OPEN, DOTS1, GEMMA4_UNIFIED, MIMO2, DOTS3_NOTE, EXAONE_MOE, COHERE2,
    COHERE2_MOE, HY3, BAILING_MOE, BAILING_MOE2, LAGUNA, YOUTU, ARCEE, AFMOE, JAIS2, OLMOE, MELLUM, GRANITE_SWA,
    GRANITE_MOE_SWA, JINA2, PUBLISHED_JINA3, BERT, ROBERTA, JINA3, MODERN_BERT, PUBLISHED_NOMIC_BERT, NOMIC_BERT_MOE,
    NOMIC_BERT, GEMMA4_ASSISTANT, GEMMA4_UNIFIED_ASSISTANT, DFLASH, QWEN4_EXP, KIMI_LINEAR, KIMI_K3, GLM5_NEXT,
    MUSE_GLIMMER, LING3, STEP35, MINICPM, PLAMO3,
)  # fmt: skip
