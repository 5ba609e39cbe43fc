"""Is the installed torch one whose private FSDP2 code this package knows?

The adapter subclasses ``FSDPParamGroup`` and ``FSDPParam`` and runs torch's own ``post_backward`` and
``foreach_reduce`` with one name replaced in each. None of that is public, so a torch that differs in any function
that is replaced, re-bound or relied on gets stock FSDP2 instead, never a guess.

Per torch minor version, ``fingerprints.json`` lists for each such function the accepted pairs of signature and
source fingerprint. A fingerprint is taken of the syntax tree without docstrings, comments, positions and
annotations, so it is the same under every Python. Files that are byte for byte those of a known release are not
parsed again: their functions only have to be the ones that the running process really uses.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import os
import re
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ALLOW_ENV = "TIDE_ALLOW_UNKNOWN_TORCH"
OK, UNKNOWN_VERSION, UNKNOWN_SOURCE, UNKNOWN_SIGNATURE = "TIDE-OK", "TIDE-F101", "TIDE-F102", "TIDE-F103"
PACKAGE = "torch.distributed.fsdp._fully_shard"
FINGERPRINTS = Path(__file__).with_name("fingerprints.json")
FORMAT = 1

# Overridden by the adapter's subclasses, or re-bound (below).
REPLACED: dict[str, str] = {
    "_fsdp_param_group": "FSDPParamGroup.unshard FSDPParamGroup.wait_for_unshard FSDPParamGroup._to_sharded "
    "FSDPParamGroup.finalize_backward FSDPParamGroup._reset_iter_state FSDPParamGroup.lazy_init "
    "FSDPParamGroup.post_backward FSDPParamGroup._backward_prefetch",
    "_fsdp_param": "FSDPParam.init_all_gather_outputs FSDPParam.alloc_all_gather_outputs "
    "FSDPParam.free_unsharded_param FSDPParam.free_all_gather_outputs FSDPParam.reset_sharded_param",
    "_fsdp_collectives": "foreach_reduce foreach_reduce_scatter_copy_in",
}
# Not replaced, but the adapter depends on what they do, on when they run, or on the attributes that they set.
RELIED_ON: dict[str, str] = {
    "_fsdp_param_group": "FSDPCommContext.lazy_init FSDPCommContext.get_all_gather_streams "
    "FSDPCommContext.wait_all_gather_streams_on_event FSDPCommContext.release_all_gather_state_for_comm_reuse "
    "FSDPCommContext.release_all_gather_state_on_current_stream AllGatherState ReduceScatterState "
    "FSDPParamGroup.__init__ FSDPParamGroup._init_mp_dtypes FSDPParamGroup._init_reduce_scatter_param_order "
    "FSDPParamGroup._wait_all_gather_streams_on_event FSDPParamGroup.reshard FSDPParamGroup.pre_forward "
    "FSDPParamGroup.post_forward FSDPParamGroup._record_post_forward FSDPParamGroup.pre_backward "
    "FSDPParamGroup._set_unsharded_grad_dtypes FSDPParamGroup._get_reduce_dtype "
    "FSDPParamGroup._take_unsharded_grads_to_reduce FSDPParamGroup._get_unsharded_grad_to_reduce "
    "FSDPParamGroup._prepare_partial_reduce_output FSDPParamGroup._get_partial_reduce_grad "
    "FSDPParamGroup._wait_for_post_backward FSDPParamGroup._prefetch_unshard "
    "FSDPParamGroup._to_sharded_post_forward FSDPParamGroup._to_unsharded FSDPParamGroup.is_sharded "
    "FSDPParamGroup.is_unsharded FSDPParamGroup.use_training_state FSDPParamGroup._register_post_backward_hook "
    "FSDPParamGroup._register_state_dict_hooks FSDPParamGroup._reshard_after_forward "
    "FSDPParamGroup._use_post_forward_mesh FSDPParamGroup._all_gather_process_group "
    "FSDPParamGroup._reduce_scatter_process_group RegisterPostBackwardFunction.backward",
    "_fsdp_param": "ShardedState FSDPParam.__init__ FSDPParam._init_sharded_param FSDPParam.init_dtype_attrs "
    "FSDPParam._init_extensions FSDPParam.init_unsharded_param FSDPParam._release_all_gather_outputs_if_needed "
    "FSDPParam.to_sharded FSDPParam.to_unsharded FSDPParam._setattr_on_modules FSDPParam.to_sharded_dtensor "
    "FSDPParam.to_accumulated_grad_if_needed FSDPParam.accumulate_unsharded_grad_if_needed "
    "FSDPParam.all_gather_inputs FSDPParam.unsharded_param FSDPParam.unsharded_grad_dtype "
    "FSDPParam.unsharded_grad_data FSDPParam.unsharded_accumulated_grad_data FSDPParam.unsharded_zero_grad_data "
    "FSDPParam._get_grad_inner_tensor FSDPParam._sharded_local_tensor FSDPParam._assert_in_states "
    "FSDPParam._restore_spmd_types FSDPParam._capture_grad_dtype_policy "
    "alloc_storage free_storage unsafe_setattr_param set_requires_grad_if_needed",
    "_fsdp_collectives": "AllGatherResult _default_all_gather_output_fn _default_reduce_scatter_input_fn "
    "_cast_and_view_sharded_grads _get_gradient_divide_factors _div_if_needed",
    "_fsdp_common": "TrainingState _dynamo_disable _disable_functorch_if_active _get_dim0_padded_size "
    "_chunk_with_empty _get_dim_chunked_size _from_local_no_grad _to_dtype_if_needed is_bw "
    "FSDPMeshInfo.__post_init__",
    "_fsdp_state": "FSDPState.__init__ FSDPState._lazy_init FSDPState._init_shared_state FSDPState._init_fqns "
    "FSDPState._root_pre_forward FSDPState._pre_forward FSDPState._post_forward "
    "FSDPState._force_complete_incomplete_states FSDPState._pre_backward FSDPState._register_pre_backward_hook "
    "FSDPState._register_root_post_backward_final_callback FSDPState._root_post_backward_final_callback "
    "FSDPState._finalize_backward FSDPState.finalize_backward FSDPState.wait_for_gradient_reduction "
    "FSDPState._end_backward_iteration FSDPState._reset_iter_state",
    "_fully_shard": "FSDPModule.reshard FSDPModule.unshard FSDPModule._get_fsdp_state _UnshardHandleImpl.wait",
}
# Re-bound function -> the global that it must look up by name, or replacing that name would change nothing.
REBOUND: dict[str, str] = {
    "_fsdp_param_group:FSDPParamGroup.post_backward": "foreach_reduce",
    "_fsdp_collectives:foreach_reduce": "foreach_reduce_scatter_copy_in",
}
MODULES: tuple[str, ...] = tuple(dict.fromkeys((*REPLACED, *RELIED_ON)))


def targets(module: str) -> tuple[str, ...]:
    """Qualified names checked in ``module`` (a module name inside :data:`PACKAGE`), the replaced ones first."""
    return tuple(f"{REPLACED.get(module, '')} {RELIED_ON.get(module, '')}".split())


@dataclass(frozen=True)
class GuardResult:
    """Verdict on the installed torch.

    ``code`` is ``TIDE-OK``, ``TIDE-F101`` (unknown version), ``TIDE-F102`` (a function's source is not a known
    one) or ``TIDE-F103`` (a function is missing, or cannot be called or re-bound as expected). ``warning`` is set
    only where the developers' override turned F101 or F102 into ``supported``.
    """

    supported: bool
    version: str
    code: str
    reason: str = ""
    remedy: str = ""
    warning: str = ""


# --- signatures and fingerprints -----------------------------------------------------------------------------


def fingerprint(node: ast.AST) -> str:
    """Fingerprint of a function or class definition: 32 hex digits, independent of the Python that parsed it.

    Its own name, docstrings, comments, layout and annotations do not count; decorators, defaults and messages do.
    """
    parts: list[str] = []
    _serialise(node, parts, top=True)
    return hashlib.sha256("".join(parts).encode("ascii")).hexdigest()[:32]


# Left out: what has no effect at run time (annotations, ``u`` prefixes) or is implied (contexts).
_SKIPPED = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "type_ignores"})


def _serialise(value: Any, out: list[str], *, top: bool = False) -> None:
    """Append a canonical text. Empty fields are dropped, so fields that newer Pythons add do not show."""
    if isinstance(value, ast.AnnAssign):
        if value.value is None:
            return  # a bare ``name: type`` does nothing
        value = ast.Assign(targets=[value.target], value=value.value)
    if isinstance(value, ast.AST):
        out.append(f"({type(value).__name__}")
        for name in sorted(value._fields):
            item = getattr(value, name, None)
            if name in _SKIPPED or item is None or item == [] or (top and name == "name"):
                continue
            if name == "body" and isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                item = _without_docstring(item)
            if isinstance(value, ast.JoinedStr):
                item = _merged_text(value.values)
            out.append(f" {name}=")
            _serialise(item, out)
        out.append(")")
    elif isinstance(value, list):
        out.append("[")
        for item in value:
            _serialise(item, out)
        out.append("]")
    else:
        # ascii(): which characters repr() leaves as they are depends on the Unicode tables of the interpreter.
        out.append(f"{type(value).__name__}:{value!a};")


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


def _merged_text(values: list[ast.expr]) -> list[ast.expr]:
    """Pieces of an f-string with neighbouring texts joined: Pythons before 3.12 split them differently."""
    merged: list[ast.expr] = []
    for item in values:
        last = merged[-1] if merged else None
        if isinstance(item, ast.Constant) and item.value == "":
            continue
        if isinstance(item, ast.Constant) and isinstance(last, ast.Constant):
            merged[-1] = ast.Constant(value=str(last.value) + str(item.value))
        else:
            merged.append(item)
    return merged


def signature_of_function(function: types.FunctionType) -> str:
    """Parameter names, kinds and defaults of a function of the running process, without annotations."""
    code = function.__code__
    n, k = code.co_argcount, code.co_kwonlyargcount
    names, at = code.co_varnames, code.co_argcount + code.co_kwonlyargcount
    vararg = names[at] if code.co_flags & inspect.CO_VARARGS else None
    kwarg = names[at + bool(vararg)] if code.co_flags & inspect.CO_VARKEYWORDS else None
    defaults = [value_text(d) for d in function.__defaults__ or ()]
    keyword = {name: value_text(d) for name, d in (function.__kwdefaults__ or {}).items()}
    return signature_text(
        list(names[:n]), code.co_posonlyargcount, defaults, vararg, list(names[n : n + k]), keyword, kwarg
    )


def signature_text(
    plain: list[str],
    posonly: int,
    defaults: list[str],
    vararg: str | None,
    kwonly: list[str],
    keyword: dict[str, str],
    kwarg: str | None,
) -> str:
    """Canonical text of a signature; ``defaults`` belong to the last of the ``plain`` parameters."""
    without = len(plain) - len(defaults)
    parts = [name if i < without else f"{name}={defaults[i - without]}" for i, name in enumerate(plain)]
    if posonly:
        parts.insert(posonly, "/")
    if vararg or kwonly:
        parts.append(f"*{vararg or ''}")
    parts += [f"{name}={keyword[name]}" if name in keyword else name for name in kwonly]
    return ", ".join(parts + ([f"**{kwarg}"] if kwarg else []))


def value_text(value: Any) -> str:
    """Canonical text of a default, if it is a plain constant; which object any other default is does not count."""
    simple = value is None or isinstance(value, (bool, int, float, str, bytes, tuple))
    return ascii(value) if simple else "<expression>"


def index_source(text: str) -> dict[str, ast.AST]:
    """Definitions of a module by qualified name (``Class.method``); of several, the first."""
    found: dict[str, ast.AST] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for item in body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(prefix + item.name, item)
                if isinstance(item, ast.ClassDef):
                    visit(item.body, f"{prefix}{item.name}.")

    visit(ast.parse(text).body, "")
    return found


def file_hash(data: bytes) -> str:
    """Hash by which the file of a known release is recognised without parsing it."""
    return hashlib.sha256(data).hexdigest()[:32]


# --- the table ------------------------------------------------------------------------------------------------


def load_table(path: Path | None = None) -> dict[str, Any]:
    """The known releases by minor version: ``{"2.13": {"versions": [...], "files": {...}, "functions": {...}}}``.

    ``functions`` maps ``module:qualified.name`` to the accepted ``[signature, fingerprint]`` pairs; ``null``
    stands for a release that has no such function. Raises :class:`ValueError` if the file is not such a table.
    """
    path = path or FINGERPRINTS
    try:
        data = json.loads(path.read_text("utf-8"))
        table: dict[str, Any] = data["torch"]
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, expected {FORMAT}")
        if not table:
            raise ValueError("it knows no release")
        for entry in table.values():
            complete = {f"{m}:{q}" for m in MODULES for q in targets(m)} == set(entry["functions"])
            if not complete or not entry["versions"] or set(entry["files"]) != set(MODULES):
                raise ValueError("it does not cover the functions that this version checks")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} cannot be used: {type(error).__name__}: {error}") from error
    return table


def minor_of(version: str) -> tuple[int, int]:
    """``(2, 13)`` of ``2.13.0+cu132``; pre-releases count as the release that they lead to."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"torch version {version!r} does not start with major.minor")
    return int(found[1]), int(found[2])


# --- the check ------------------------------------------------------------------------------------------------


def check_torch() -> GuardResult:
    """Compare the running torch with the known releases. Never raises; the first answer is kept.

    Functions are looked up where the process would find them, so a library that patched one is noticed if it did
    so before the first call. ``TIDE_ALLOW_UNKNOWN_TORCH=1`` (for developers) turns F101 and F102 into a warning.
    """
    return _check(os.environ.get(ALLOW_ENV, "") == "1")


@functools.lru_cache(maxsize=2)
def _check(allow: bool) -> GuardResult:
    version = ""
    try:
        import torch

        version = str(torch.__version__)
        result = _verdict(version)
    except Exception as error:
        reason = f"the check of torch's FSDP2 could not be made: {type(error).__name__}: {error}"
        return GuardResult(False, version, UNKNOWN_SOURCE, reason, "Reinstall torch and tide-strategies.")
    if allow and not result.supported and result.code != UNKNOWN_SIGNATURE:
        warning = f"{result.code}: {result.reason} {ALLOW_ENV}=1 is set: TIDE runs on it all the same, untested."
        return GuardResult(True, version, result.code, result.reason, result.remedy, warning)
    return result


def _verdict(version: str) -> GuardResult:
    table = load_table()
    minor = minor_of(version)
    known = {minor_of(name): entry for name, entry in table.items()}
    # Of an unknown minor the signatures are compared with the nearest: the override must not reach a torch that
    # cannot be called as the adapter calls it.
    nearest = min(known, key=lambda other: (abs(other[0] - minor[0]), abs(other[1] - minor[1])))
    problems = _problems(known[nearest], sources=nearest == minor)
    names = ", ".join(f"{a}.{b}" for a, b in sorted(known))
    remedy = (
        f"Stock FSDP2 is used. Install a release of torch {names}, or a newer tide-strategies. "
        f"Developers: {ALLOW_ENV}=1 tries TIDE on it all the same."
    )
    broken = [text for code, text in problems if code == UNKNOWN_SIGNATURE]
    if broken:
        return GuardResult(False, version, UNKNOWN_SIGNATURE, _sentence(version, broken), remedy.split(" Dev")[0])
    if nearest != minor:
        reason = f"torch {version} is not one of the known versions ({names})."
        return GuardResult(False, version, UNKNOWN_VERSION, reason, remedy)
    if problems:
        return GuardResult(False, version, UNKNOWN_SOURCE, _sentence(version, [text for _, text in problems]), remedy)
    return GuardResult(True, version, OK, "every checked function is that of a known release.")


def _sentence(version: str, texts: list[str]) -> str:
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return f"torch {version}: {texts[0]}{more}."


def _problems(entry: dict[str, Any], *, sources: bool) -> list[tuple[str, str]]:
    """What differs from ``entry``, as (code, text); signatures alone unless ``sources``."""
    import importlib

    problems: list[tuple[str, str]] = []
    for name in MODULES:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        source = _Source(module, entry["files"][name]) if sources else None
        for qualname in targets(name):
            problem = _problem(module, qualname, entry["functions"][f"{name}:{qualname}"], source)
            if problem is not None:
                problems.append(problem)
    return problems


def _problem(
    module: types.ModuleType, qualname: str, accepted: list[list[str] | None], source: _Source | None
) -> tuple[str, str] | None:
    member: Any = module
    for part in qualname.split("."):
        member = vars(member).get(part) if hasattr(member, "__dict__") else None
    pairs = [pair for pair in accepted if pair is not None]
    if member is None:
        return None if None in accepted else (UNKNOWN_SIGNATURE, f"{qualname} is missing")
    if not pairs:
        # An addition that older code cannot know about: its callers are checked too, but not what it does.
        return None if source is None else (UNKNOWN_SOURCE, f"{qualname} exists, and does not in known releases")
    function: types.FunctionType | None = None
    layers: list[Any] = []
    if isinstance(member, type):
        fields: Any = getattr(member, "_fields", None) or getattr(member, "__members__", ())
        signature = f"class {', '.join(fields)}"
    else:
        function, layers = _unwrapped(member)
        if function is None:
            return UNKNOWN_SIGNATURE, f"{qualname} is a {type(member).__name__}, not a Python function"
        signature = signature_of_function(function)
        wanted = REBOUND.get(f"{module.__name__.rpartition('.')[2]}:{qualname}")
        if wanted is not None and wanted not in function.__code__.co_names:
            return UNKNOWN_SIGNATURE, f"{qualname} does not look up {wanted}, so it cannot be re-bound"
    expected = {pair[0] for pair in pairs}
    if signature not in expected:
        return UNKNOWN_SIGNATURE, f"{qualname} has the signature ({signature}), not ({' or '.join(sorted(expected))})"
    return source.problem(qualname, member, function, layers, {pair[1] for pair in pairs}) if source else None


def _unwrapped(member: Any) -> tuple[types.FunctionType | None, list[Any]]:
    """The function inside a method object or decorators, and the decorators' wrappers around it."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    layers: list[Any] = []
    while hasattr(member, "__wrapped__") and len(layers) < 20:
        layers.append(member)
        member = member.__wrapped__
    return (member if isinstance(member, types.FunctionType) else None), layers


class _Source:
    """The source of one of torch's modules, parsed only if the file is not that of a known release."""

    def __init__(self, module: types.ModuleType, known: list[str]) -> None:
        self.module = module
        self.file = str(getattr(module, "__file__", ""))
        # Where decorators may come from: torch itself, and contextlib, whose contextmanager torch uses.
        self.trusted = (f"{Path(self.file).parents[3]}{os.sep}", str(contextlib.__file__))
        try:
            self.known = file_hash(Path(self.file).read_bytes()) in known
        except OSError:
            self.known = False

    @functools.cached_property
    def index(self) -> dict[str, ast.AST]:
        return index_source(inspect.getsource(self.module))

    def problem(
        self, qualname: str, member: Any, function: types.FunctionType | None, layers: list[Any], known: set[str]
    ) -> tuple[str, str] | None:
        for layer in layers:
            file = getattr(getattr(layer, "__code__", None), "co_filename", "another kind of object")
            if not file.startswith(self.trusted):
                return UNKNOWN_SOURCE, f"{qualname} is wrapped by code outside torch ({file})"
        owner = member.__module__ if function is None else function.__globals__.get("__name__")
        if owner != self.module.__name__:
            return UNKNOWN_SOURCE, f"{qualname} was replaced by code of {owner}"
        own = function is None or (function.__code__.co_filename == self.file and function.__qualname__ == qualname)
        if own and self.known:
            return None
        try:
            found = fingerprint(self._node(qualname, function if not own else None))
        except (OSError, TypeError, SyntaxError, KeyError, IndexError) as error:
            return UNKNOWN_SOURCE, f"the source of {qualname} is not available ({type(error).__name__}: {error})"
        return None if found in known else (UNKNOWN_SOURCE, f"{qualname} differs from every known release")

    def _node(self, qualname: str, foreign: types.FunctionType | None) -> ast.AST:
        if foreign is None:
            return self.index[qualname]
        return ast.parse(textwrap.dedent(inspect.getsource(foreign))).body[0]
