"""The known vision towers, by the architecture of the whole model."""

from bridge.models.towers.gemma import GEMMA3, GEMMA4, GEMMA4_UNIFIED
from bridge.models.towers.glm4v import GLM4V, GLM5V
from bridge.models.towers.internvl import INTERNVL
from bridge.models.towers.minimax_m3 import MINIMAX_M3
from bridge.models.towers.pixtral import PIXTRAL
from bridge.models.towers.qwen_vl import EXAONE4_5, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from bridge.models.towers.tower import Tower

ALL = (
    QWEN2_VL, QWEN2_5_VL, QWEN3_VL, GEMMA3, GEMMA4, GEMMA4_UNIFIED, PIXTRAL, INTERNVL, MINIMAX_M3, GLM4V, GLM5V,
    EXAONE4_5,
)  # fmt: skip
TOWERS: dict[str, Tower] = {name: tower for tower in ALL for name in tower.architectures}
