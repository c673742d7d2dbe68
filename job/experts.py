"""Experts of a mixture, which transformers stacks in parameters: their number, and how 4 bits hold them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# The names that configs of transformers 5 have for the number of experts a token is routed to.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
KIND = "bitsandbytes_4bit"
HOW: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}


def count(facts: Mapping[str, Any]) -> int:
    """The experts of a layer, at most, of a text model with this configuration; 0 when it is no mixture."""
    named = [facts[name] or 0 for name in COUNTS if name in facts]
    nested = [count(one) for one in facts.values() if isinstance(one, Mapping)]
    return max((*(max(one) if isinstance(one, list) else one for one in named), *nested, 0))


@contextmanager
def in_four_bits() -> Iterator[None]:
    """Let a 4-bit model that is loaded inside the context have its stacked experts in 4 bits, too.

    Each stack is quantised as soon as it is read: of the 16 bits, one layer's are in memory, never all.
    transformers 5.24 quantises linear layers only; to be removed when its own quantizer takes experts.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    original = AUTO_QUANTIZER_MAPPING[KIND]
    AUTO_QUANTIZER_MAPPING[KIND] = type("ExpertsQuantizer", (StackedExperts, original), {})
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[KIND] = original


class StackedExperts:
    """What transformers' 4-bit quantizer lacks; a mixin, as importing it imports torch."""

    stacked: frozenset[str] = frozenset()

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, *args, **kwargs)  # type: ignore[misc]
        self.stacked = frozenset(
            name for name, one in model.named_parameters() if one.ndim == 3 and "experts" in name.split(".")
        )

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.stacked or super().param_needs_quantization(model, param_name, **kwargs)  # type: ignore[misc]

    def get_quantize_ops(self) -> Any:
        return _Quantise(self.stacked, super().get_quantize_ops())  # type: ignore[misc]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Let the experts' modules see their weights as before; the layer at work has a copy in 16 bits."""
        from bitsandbytes.nn.parametrize import replace_parameter_4bit, replace_parameter_4bit_prequantized

        for path in sorted(self.stacked):
            module_path, _, name = path.rpartition(".")
            module = model.get_submodule(module_path)
            parameter = module.get_parameter(name)
            if parameter.is_floating_point():  # of a repository in 4 bits, whose experts are not
                replace_parameter_4bit(module, name, **HOW)
            else:
                facts = parameter.quant_state.as_dict(packed=True)
                replace_parameter_4bit_prequantized(module, name, facts, parameter.device)
        return super()._process_model_after_weight_loading(model, **kwargs)  # type: ignore[misc]


class _Quantise:
    """A conversion of the library's loader: quantises stacks, leaves linear layers to the library's own."""

    def __init__(self, stacked: frozenset[str], of_linear_layers: Any):
        self.stacked, self.of_linear_layers = stacked, of_linear_layers

    def convert(self, tensors: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        from bitsandbytes.functional import quantize_4bit
        from torch.nn import Parameter

        if not tensors.keys() <= self.stacked:
            return self.of_linear_layers.convert(tensors, **more)
        converted = {}
        for name, found in tensors.items():
            packed, state = quantize_4bit(found[0] if isinstance(found, list) else found, **HOW)
            converted[name] = Parameter(packed, requires_grad=False)
            converted[name].quant_state = state
        return converted
