"""The numbers of layers and experts in names of a checkpoint's tensors."""

from bridge.checkpoint.tensor_names import expert_of, layer_of


def test_the_layer_of_a_tensor_is_the_first_number():
    names = ("model.layers.3.mlp.experts.5.w1.weight", "transformer.h.0.attn", "0.weight", "lm_head.weight", "layers.3")
    assert [layer_of(name) for name in names] == [3, 0, 0, None, None]


def test_the_parts_of_an_experts_name():
    expert = expert_of("model.layers.3.mlp.experts.5.gate_proj.weight")
    assert expert == ("model.layers.3.mlp.experts", 5, "gate_proj.weight")
    assert expert is not None
    assert expert.pattern == "model.layers.3.mlp.experts.*.gate_proj.weight"
    assert expert_of("experts.0.w1") == ("experts", 0, "w1")
    assert [expert_of(n) for n in ("mlp.shared_experts.0.w1", "mlp.experts.gate_up_proj", "a.experts.5")] == 3 * [None]
