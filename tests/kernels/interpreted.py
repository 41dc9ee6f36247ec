"""Runs a file under Triton's interpreter and prints what its function `in_interpreter` returns, if it has one, as JSON:
`python interpreted.py FILE`, with TRITON_INTERPRET=1.

It takes a third of the time so, for the same results. As it is, the interpreter patches triton.language at every call
of a kernel or of a function within one: here once. For each result of each operation it makes constants of its shape:
here once for each shape. It computes every sum of integers a second time in int64, for an assertion that it makes only
with `debug`, which it never sets.
"""

import dataclasses
import functools
import gc
import json
import math
import runpy
import sys
from pathlib import Path

import triton
from triton import language
from triton.language import core
from triton.runtime import interpreter

np_dtype = interpreter._get_np_dtype
of_scalar = functools.cache(np_dtype)
init_block_type = core.block_type.__init__


def numpy_type(dtype):
    """Of a number's type, which has a hash; a block's has none."""
    return of_scalar(dtype) if type(dtype) is language.dtype else np_dtype(dtype)


@functools.cache
def constants(shape):
    """What a tensor has of its shape, and its number of elements."""
    return language.tuple([language.constexpr(n) for n in shape]), language.constexpr(math.prod(shape))


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = constants(tuple(type.shape.values) if type.is_block() else ())


@functools.cache
def checked(shape):
    """What a block's type has of its shape; raises for a shape that no block has."""
    usual = object.__new__(core.block_type)
    init_block_type(usual, language.int1, list(shape))
    return usual.shape, usual.numel, str(usual.shape)


def init_block(self, element_ty, shape):
    sizes = [n.value if isinstance(n, core.constexpr) else n for n in shape]
    self.shape, self.numel, name = checked(tuple(sizes))
    self.element_ty, self.name = element_ty, f"<{name}, {element_ty}>"


def patch_attribute(owner, name, member, builder, scope):
    """Lets a builtin function take what it calls `_semantic` from the interpreter."""
    usual, semantic = getattr(member, "__wrapped__", member), interpreter.TritonSemantic(builder)

    def interpreted(*arguments, _semantic=None, **named):
        return usual(*arguments, **named, _semantic=semantic)

    scope.set_attr(owner, name, interpreted)


def hasten() -> None:
    """Triton 3.6's interpreter; another version with other inner names runs as it is."""
    gc.freeze()  # what is imported stays; to look through it for garbage takes longer than a small kernel
    if not triton.__version__.startswith("3.6."):
        return
    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang(hasten)  # of a file that sees language and core, as those of kernels do
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter._get_np_dtype = numpy_type
    language.tensor.__init__ = init_tensor
    core.block_type.__init__ = init_block
    for builder in (interpreter.interpreter_builder, interpreter.interpreter_semantic.builder):
        if not builder.options.debug:
            builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    hasten()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(__file__).parent))
    names = runpy.run_path(sys.argv[0], run_name="__main__")
    if "in_interpreter" in names:
        print(json.dumps(names["in_interpreter"]()))
