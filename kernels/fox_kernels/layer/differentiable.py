"""A fused function with its gradient, made of two functions that launch kernels.

In eager mode an autograd function calls the two. Under torch.compile they are the operators `fox_kernels::NAME` and
`fox_kernels::NAME_backward`, at which no graph breaks; in eager mode those would cost the host three times as much.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pass(NamedTuple):
    """A forward or a backward: what launches its kernels, its schema for torch.library, its outputs unwritten."""

    launch: Callable
    schema: str
    like: Callable


def _operator(name: str, of: Pass) -> Any:
    def run(*inputs):
        with torch.cuda.device_of(inputs[0]):
            found = of.launch(*inputs)
        if isinstance(found, Tensor):
            return found
        return tuple(inputs[0].new_empty(0) if x is None else x for x in found)  # an output must be a tensor

    operator = torch.library.custom_op(f"fox_kernels::{name}", run, mutates_args=(), schema=of.schema)
    operator.register_fake(of.like)
    return operator


def differentiable(name: str, forward: Pass, backward: Pass, saved: Callable, outputs: int = 1) -> Callable[..., Any]:
    """Return the function `forward.launch`, differentiable once.

    saved: inputs, output -> (tensors, other values), which the backward takes behind the outputs' gradients; it returns
    the gradients of the first inputs, whose other inputs have none. outputs: those beyond are for the backward alone.
    """
    operator, backward_operator = _operator(name, forward), _operator(f"{name}_backward", backward)

    def set_up(ctx, inputs, output):
        tensors, ctx.others = saved(inputs, output)
        ctx.save_for_backward(*tensors)

    def gradients(ctx, launch, *given):
        found = launch(*given[:outputs], *ctx.saved_tensors, *ctx.others)
        return tuple(found[n] if needed and n < len(found) else None for n, needed in enumerate(ctx.needs_input_grad))

    operator.register_autograd(lambda ctx, *given: gradients(ctx, backward_operator, *given), setup_context=set_up)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch.cuda.device_of(inputs[0]):
                output = forward.launch(*inputs)
            set_up(ctx, inputs, output)
            return output[:outputs] if isinstance(output, tuple) else output

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *given):
            with torch.cuda.device_of(given[0]):
                return gradients(ctx, backward.launch, *given)

    def call(*inputs):
        return (operator if torch.compiler.is_compiling() else Function.apply)(*inputs)

    return call
