"""The generated tree is compiled as it is checked: names that no list of words holds."""

from __future__ import annotations

import importlib.util

from xattn import images


def hipify_module():
    path = next(p for root in images.source_roots() if (p := root / "hipify.py").is_file())
    spec = importlib.util.spec_from_file_location("hipify_under_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tree_compiles(amd_compiler):
    hipify = hipify_module()
    assert hipify.compile_errors(hipify.generate(), hipify.compiler()) == ""


def test_what_does_not_compile_is_reported(amd_compiler):
    """__any is a name of HIP that plain clang lacks; a barrier of a warp is mapped to builtins that it has."""
    hipify = hipify_module()
    name = "kernels/softmax.h"
    for line, error in (
        ("__device__ inline bool f(bool x) { return __any_sync(0xffffffff, x); }", "'__any'"),
        ("__device__ inline void f() { __syncwarp(); }", ""),
    ):
        tree = hipify.generate()
        before = tree[name].count("\n")
        tree[name] = hipify.hipify(tree[name] + line + "\n")
        assert hipify.leftovers(name, tree[name]) == []
        found = hipify.compile_errors(tree, hipify.compiler())
        assert error in found and (f"{name}:{before + 1}:" in found) == bool(error)
        assert bool(hipify.problems(tree)) == bool(error)
