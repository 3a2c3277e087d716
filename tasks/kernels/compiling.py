"""Compile loops with numba, and write LLVM code where its compiler does not find the registers by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba import extending
from numba.core import cgutils, registry

llvm: Any = cgutils
ir = llvm.ir              # LLVM's types of the version that numba uses


def compiled(function: Callable[..., Any]) -> Any:
    """Compile with a cache on disk, in the user's cache folder if this one is read-only, else without a cache."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:
        return numba.njit(nogil=True, error_model="numpy")(function)


def inline(function: Callable[..., Any]) -> Any:
    """Copy a function into its callers: a call for each row would pass dozens of arguments."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """Declare a function that writes its own LLVM code; numba has no types for its calls."""
    return extending.intrinsic(prefer_literal=True)(function)


def is_cached(kernel: Any) -> bool:
    """Return whether numba has this kernel on disk."""
    module, name = kernel.py_func.__module__.rpartition(".")[2], kernel.py_func.__name__
    folder = kernel.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"{module}.{name}-*.nbc"))


def has_avx512() -> bool:
    """Decide whether numba compiles for a processor with AVX-512: 32 registers of 64 bytes."""
    features: str = registry.cpu_target.target_context.codegen().magic_tuple()[2]
    return "+avx512f" in features.split(",")


def find_item(context: Any, builder: Any, kind: Any, array: Any, *at: Any) -> Any:
    """Return the address of an entry."""
    made = context.make_array(kind)(context, builder, array)
    return llvm.get_item_pointer(context, builder, kind, made, list(at), wraparound=False)


def broadcast(builder: Any, value: Any, vector: Any) -> Any:
    """Return a register of this type with a number in all places."""
    undefined, index = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    return builder.shuffle_vector(
        builder.insert_element(undefined, value, ir.Constant(index, 0)),
        undefined, ir.Constant(ir.VectorType(index, vector.count), None),
    )


def prefetch(builder: Any, address: Any, level: int = 1) -> None:
    """Ask for the cache line of an address, in the L1 or the L2 cache; none is wrong."""
    place, option = builder.bitcast(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    options = [ir.Constant(option, value) for value in (0, 4 - level, 1)]      # to read, data
    kind = ir.FunctionType(ir.VoidType(), [place.type, option, option, option])
    builder.call(llvm.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [place, *options])
