"""A kernel in C that reads only the rows of live neurons, and what compiles and loads it.

Its source travels as text in this file, because transformers copies no other files of code. The
first call compiles it with the C compiler of the machine, once: the library is kept in the user's
cache folder, under a name made from the source, the flags and the machine. It is loaded from a
folder and a file that belong to the user and that nobody else can write. Without a compiler, or
with SURGERY_KERNEL=0 in the environment, `available` says no, and sparse_mlp.py goes on in torch.

For a block of neurons at a time, each thread reads the rows of the gate, then the rows of up and
down whose neuron is live for any of the tokens, and adds to a sum of its own. It rounds gate, up
and product to the dtype of the weights, as torch does between its operations, so that a rule that
jumps at its threshold decides alike, and sums in fp32. In fp32 both agree to rounding where the
rule is continuous (plain, shifted, drelu at 0). Where it jumps, a gate within rounding of the
threshold may fall on either side of it, and the outputs then differ by what that one neuron adds.

Threads are those of torch: the library is linked to no OpenMP of its own, but finds the one that
torch has loaded. Two runtimes would each keep threads spinning, on the same cores.

Shapes: T tokens, H hidden_size, F intermediate_size.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import library as operators

MOST_TOKENS = 8  # the union of the live neurons of more tokens is nearly all of them
SWITCH = "SURGERY_KERNEL"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
RULES = ("plain", "fatrelu", "shifted", "drelu", "cats", "teal")
ACTIVATIONS = ("linear", "relu", "relu2", "silu", "gelu", "gelu_pytorch_tanh")
LEVELS = ("plain C", "AVX2", "AVX-512", "AVX-512-BF16", "NEON")
_PATIENCE = 120  # seconds for the compiler
_COMMON = ("-O3", "-fPIC", "-shared")
# Of several threads first. What it needs of OpenMP is left open, for torch's to be found.
FLAGS = (
    (*_COMMON, "-fopenmp", "-nodefaultlibs", "-lm", "-lc", "-lgcc"),
    (*_COMMON, "-lm"),
)
# The fields of `Call` in the C file.
_TENSORS = ("x", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "t", "t_up")
_POINTERS = (*_TENSORS, "y", "scratch")
_SIZES = ("tokens", "hidden", "width", "t_step", "t_up_step")
_NUMBERS = (*_SIZES, "dtype", "rule", "act", "threads", "level")

_TYPES = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BLOCK 64      /* neurons whose gates are read before any row of up or down */
#define TOKENS 8
#define AHEAD 4       /* rows of the gate between the one asked for and the one read */
#define STRIDE 2048   /* bytes; a row is asked for by one line of each */
enum { F32, BF16, F16 };
enum { PLAIN, FATRELU, SHIFTED, DRELU, CATS, TEAL };
enum { LINEAR, RELU, RELU2, SILU, GELU, GELU_TANH };
enum { PLAIN_C, AVX2, AVX512, AVX512BF16, NEON, LEVELS };

typedef struct {
  const void *x, *gate, *up, *down, *gate_bias, *up_bias, *down_bias;  /* no gate: NULL */
  const float *t, *t_up;    /* NULL: no threshold */
  void *y;
  float *scratch;           /* [tokens * hidden] and [threads * tokens * hidden] */
  int64_t tokens, hidden, width, t_step, t_up_step;  /* steps: 1 per neuron, 0 for one threshold */
  int64_t dtype, rule, act, threads, level;
} Call;

typedef float Dot(const void *w, const void *x, int64_t n);
typedef void Axpy(float *y, const void *w, float s, int64_t n);
typedef struct { Dot *dot; Axpy *axpy; int raw; } Ops;  /* raw: dot takes x as it is, not in fp32 */

/* --- numbers ---------------------------------------------------------------------------------- */

static inline uint32_t bits(float v) { uint32_t b; memcpy(&b, &v, 4); return b; }
static inline float value(uint32_t b) { float v; memcpy(&v, &b, 4); return v; }
static inline float from_f32(float v) { return v; }
static inline float from_bf16(uint16_t v) { return value((uint32_t)v << 16); }
static inline uint16_t to_bf16(float v) {  /* to the nearest, ties to even */
  uint32_t b = bits(v);
  return v != v ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
static inline float from_f16(uint16_t v) {
  uint32_t sign = (uint32_t)(v & 0x8000) << 16, e = (v >> 10) & 31, m = v & 1023;
  if (e == 0) return value(sign | bits((float)m * 0x1p-24f));
  return value(sign | (e == 31 ? 0x7f800000 | m << 13 : (e + 112) << 23 | m << 13));
}
static inline uint16_t to_f16(float v) {
  uint32_t b = bits(v), sign = b & 0x80000000;
  b ^= sign;
  if (b >= 0x47800000) b = b > 0x7f800000 ? 0x7e00 : 0x7c00;
  else if (b < 0x38800000) b = bits(value(b) + 0.5f) - 0x3f000000;  /* subnormal */
  else b = (b + 0xc8000fff + ((b >> 13) & 1)) >> 13;
  return (uint16_t)(b | sign >> 16);
}
static float at(const void *p, int64_t i, int64_t dtype) {
  if (dtype == F32) return ((const float *)p)[i];
  uint16_t v = ((const uint16_t *)p)[i];
  return dtype == BF16 ? from_bf16(v) : from_f16(v);
}
static float rounded(float v, int64_t dtype) {
  return dtype == F32 ? v : dtype == BF16 ? from_bf16(to_bf16(v)) : from_f16(to_f16(v));
}

/* --- rules: RULES of sparse_mlp.py ------------------------------------------------------------ */

static float activated(float g, int64_t act) {
  switch (act) {
    case RELU: return g < 0 ? 0 : g;  /* NaN stays NaN */
    case RELU2: return g < 0 ? 0 : g * g;
    case SILU: return g / (1 + expf(-g));
    case GELU: return 0.5f * g * (1 + erff(g * 0.70710678f));
    case GELU_TANH: return 0.5f * g * (1 + tanhf(0.79788456f * (g + 0.044715f * g * g * g)));
    default: return g;
  }
}
static float opened(const Call *c, float g, float t) {
  if (c->rule == SHIFTED) g -= t;
  float a = (c->rule == FATRELU || c->rule == DRELU) && g < t ? 0 : activated(g, c->act);
  a = rounded(a, c->dtype);
  return c->rule == CATS && fabsf(a) < t ? 0 : a;
}
"""

# One instruction set: how many floats a register holds (W), and what is done with registers (V).
_SETS = {
    "plain": r"""
#define TARGET
#define W 4
typedef float V_plain __attribute__((vector_size(16)));
#define V V_plain
#define ZERO (V){0, 0, 0, 0}
#define SET(s) (V){s, s, s, s}
#define EACH(f, p) (V){f((p)[0]), f((p)[1]), f((p)[2]), f((p)[3])}
#define LOAD_f32(p) EACH(from_f32, p)
#define LOAD_bf16(p) EACH(from_bf16, p)
#define LOAD_f16(p) EACH(from_f16, p)
#define STORE(p, v) { V s_ = v; memcpy(p, &s_, 16); }
#define FMA(a, b, c) ((a) * (b) + (c))
#define SUM(v) ((v)[0] + (v)[1] + ((v)[2] + (v)[3]))
""",
    "avx2": r"""
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define W 8
#define V __m256
#define ZERO _mm256_setzero_ps()
#define SET(s) _mm256_set1_ps(s)
#define HALF(p) _mm_loadu_si128((const __m128i *)(p))
#define LOAD_f32(p) _mm256_loadu_ps(p)
#define LOAD_bf16(p) \
  _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(HALF(p)), 16))
#define LOAD_f16(p) _mm256_cvtph_ps(HALF(p))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
TARGET static float sum_avx2(V v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
#define SUM(v) sum_avx2(v)
""",
    "avx512": r"""
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define W 16
#define V __m512
#define ZERO _mm512_setzero_ps()
#define SET(s) _mm512_set1_ps(s)
#define HALF(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD_f32(p) _mm512_loadu_ps(p)
#define LOAD_bf16(p) \
  _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(HALF(p)), 16))
#define LOAD_f16(p) _mm512_cvtph_ps(HALF(p))
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define SUM(v) _mm512_reduce_add_ps(v)
""",
    "neon": r"""
#define TARGET
#define W 4
#define V float32x4_t
#define ZERO vdupq_n_f32(0)
#define SET(s) vdupq_n_f32(s)
#define LOAD_f32(p) vld1q_f32(p)
#define LOAD_bf16(p) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))
#define LOAD_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define STORE(p, v) vst1q_f32(p, v)
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#define SUM(v) vaddvq_f32(v)
""",
}

# The loops over a row, for each instruction set and each dtype. Four sums hide the latency of FMA.
_LOOPS = r"""
TARGET static float dot_@SET_@DTYPE(const void *w_, const void *x_, int64_t n) {
  const @TYPE *w = w_;
  const float *x = x_;
  V a = ZERO, b = ZERO, c = ZERO, d = ZERO;
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    a = FMA(LOAD_@DTYPE(w + i), LOAD_f32(x + i), a);
    b = FMA(LOAD_@DTYPE(w + i + W), LOAD_f32(x + i + W), b);
    c = FMA(LOAD_@DTYPE(w + i + 2 * W), LOAD_f32(x + i + 2 * W), c);
    d = FMA(LOAD_@DTYPE(w + i + 3 * W), LOAD_f32(x + i + 3 * W), d);
  }
  for (; i + W <= n; i += W) a = FMA(LOAD_@DTYPE(w + i), LOAD_f32(x + i), a);
  float s = SUM(a) + SUM(b) + (SUM(c) + SUM(d));
  for (; i < n; i++) s += from_@DTYPE(w[i]) * x[i];
  return s;
}
TARGET static void axpy_@SET_@DTYPE(float *y, const void *w_, float s, int64_t n) {
  const @TYPE *w = w_;
  V v = SET(s);
  int64_t i = 0;
  for (; i + W <= n; i += W) STORE(y + i, FMA(v, LOAD_@DTYPE(w + i), LOAD_f32(y + i)));
  for (; i < n; i++) y[i] += s * from_@DTYPE(w[i]);
}
"""
_LOADS = ("LOAD_f32", "LOAD_bf16", "LOAD_f16")
_MACROS = ("TARGET", "W", "V", "ZERO", "SET", "EACH", "HALF", *_LOADS, "STORE", "FMA", "SUM")
_C_TYPES = {"f32": "float", "bf16": "uint16_t", "f16": "uint16_t"}

# Products of pairs of bf16: half as many instructions, and x is read as bf16 too.
_PAIRS = r"""
#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define HAS_PAIRS 1
#define PAIR(p) (__m512bh)_mm512_loadu_si512(p)
__attribute__((target("avx512bf16,avx512f,avx2,fma")))
static float dot_pairs_bf16(const void *w_, const void *x_, int64_t n) {
  const uint16_t *w = w_, *x = x_;
  __m512 a = _mm512_setzero_ps(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 128 <= n; i += 128) {
    a = _mm512_dpbf16_ps(a, PAIR(w + i), PAIR(x + i));
    b = _mm512_dpbf16_ps(b, PAIR(w + i + 32), PAIR(x + i + 32));
    c = _mm512_dpbf16_ps(c, PAIR(w + i + 64), PAIR(x + i + 64));
    d = _mm512_dpbf16_ps(d, PAIR(w + i + 96), PAIR(x + i + 96));
  }
  for (; i + 32 <= n; i += 32) a = _mm512_dpbf16_ps(a, PAIR(w + i), PAIR(x + i));
  float s = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
  for (; i < n; i++) s += from_bf16(w[i]) * from_bf16(x[i]);
  return s;
}
#endif
"""

_CALL = r"""
/* --- which instruction set -------------------------------------------------------------------- */

#define OPS(set) \
  {{dot_##set##_f32, axpy_##set##_f32, 0}, {dot_##set##_bf16, axpy_##set##_bf16, 0}, \
   {dot_##set##_f16, axpy_##set##_f16, 0}}
static const Ops PLAIN_OPS[3] = OPS(plain);
#if defined(__x86_64__)
static const Ops AVX2_OPS[3] = OPS(avx2), AVX512_OPS[3] = OPS(avx512);
#ifdef HAS_PAIRS
static const Ops PAIR_OPS = {dot_pairs_bf16, axpy_avx512_bf16, 1};
#endif
#elif defined(__aarch64__)
static const Ops NEON_OPS[3] = OPS(neon);
#endif

int64_t surgery_level(void) {  /* the best that this processor has */
#if defined(__x86_64__)
  __builtin_cpu_init();
  int wide = __builtin_cpu_supports("avx512f");
#ifdef HAS_PAIRS
  if (wide && __builtin_cpu_supports("avx512bf16")) return AVX512BF16;
#endif
  if (wide) return AVX512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? AVX2 : PLAIN_C;
#elif defined(__aarch64__)
  return NEON;
#else
  return PLAIN_C;
#endif
}

static Ops ops_of(int64_t level, int64_t dtype) {
#if defined(__x86_64__)
#ifdef HAS_PAIRS
  if (level == AVX512BF16 && dtype == BF16) return PAIR_OPS;
#endif
  if (level >= AVX512) return AVX512_OPS[dtype];
  if (level == AVX2) return AVX2_OPS[dtype];
#elif defined(__aarch64__)
  if (level == NEON) return NEON_OPS[dtype];
#endif
  return PLAIN_OPS[dtype];
}

/* --- the MLP ---------------------------------------------------------------------------------- */

typedef struct { const Call *c; Ops ops; const char *x; int64_t x_step, size; } Run;

static inline const char *row(const Run *r, const void *w, int64_t f) {
  return (const char *)w + f * r->c->hidden * r->size;
}
/* Ask for a row: the processor looks its pages up, and reads on by itself from there. */
static inline void ask(const Run *r, const void *w, int64_t f) {
  for (int64_t i = 0; i < r->c->hidden * r->size; i += STRIDE)
    __builtin_prefetch(row(r, w, f) + i, 0, 2);
}
static inline float threshold(const float *t, int64_t f, int64_t step) {
  return t ? t[f * step] : 0;
}

/* The rounded product of row f of w with token k. */
static inline float product(const Run *r, const void *w, const void *bias, int64_t f, int64_t k) {
  float v = r->ops.dot(row(r, w, f), r->x + k * r->x_step, r->c->hidden);
  return rounded(bias ? v + at(bias, f, r->c->dtype) : v, r->c->dtype);
}

/* Add to y [tokens, hidden] what the neurons from `first` to `last` give. */
static void add_block(const Run *r, int64_t first, int64_t last, float *y) {
  const Call *c = r->c;
  const void *opener = c->gate ? c->gate : c->up, *bias = c->gate ? c->gate_bias : c->up_bias;
  int64_t live[BLOCK], n = 0;
  float h[BLOCK][TOKENS];
  for (int64_t f = first; f < last; f++) {
    int any = 0;
    if (f + AHEAD < c->width) ask(r, opener, f + AHEAD);
    for (int64_t k = 0; k < c->tokens; k++) {
      h[n][k] = opened(c, product(r, opener, bias, f, k), threshold(c->t, f, c->t_step));
      any |= h[n][k] != 0;
    }
    if (!any) continue;
    live[n++] = f;
    if (c->gate) ask(r, c->up, f);
    ask(r, c->down, f);
  }
  for (int64_t i = 0; c->gate && i < n; i++) {
    for (int64_t k = 0; k < c->tokens; k++) {
      if (h[i][k] == 0) continue;
      float u = product(r, c->up, c->up_bias, live[i], k);
      if (c->rule == DRELU) u = opened(c, u, threshold(c->t_up, live[i], c->t_up_step));
      h[i][k] = rounded(h[i][k] * u, c->dtype);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    for (int64_t k = 0; k < c->tokens; k++) {
      float s = h[i][k];
      if (c->rule == TEAL && c->t && fabsf(s) < threshold(c->t, live[i], c->t_step)) s = 0;
      if (s != 0) r->ops.axpy(y + k * c->hidden, row(r, c->down, live[i]), s, c->hidden);
    }
  }
}

static void put(void *y, int64_t i, float v, int64_t dtype) {
  if (dtype == F32) ((float *)y)[i] = v;
  else ((uint16_t *)y)[i] = dtype == BF16 ? to_bf16(v) : to_f16(v);
}

void surgery_live_mlp(const Call *c) {
  int64_t all = c->tokens * c->hidden, block = BLOCK;
  while (block > 8 && c->width < 8 * block * c->threads) block /= 2;  /* or threads would wait */
  Run r = {c, ops_of(c->level, c->dtype), c->x, 0, c->dtype == F32 ? 4 : 2};
  if (!r.ops.raw && c->dtype != F32) {
    for (int64_t i = 0; i < all; i++) c->scratch[i] = at(c->x, i, c->dtype);
    r.x = (const char *)c->scratch;
  }
  r.x_step = c->hidden * (r.ops.raw ? 2 : 4);
  float *sums = c->scratch + all;
#ifdef _OPENMP
#pragma omp parallel num_threads(c->threads)
#endif
  {
    int64_t me = 0, threads = 1;
#ifdef _OPENMP
    me = omp_get_thread_num(), threads = omp_get_num_threads();
#endif
    float *mine = sums + me * all;
    memset(mine, 0, all * sizeof(float));
    for (int64_t f = me * block; f < c->width; f += threads * block)
      add_block(&r, f, f + block < c->width ? f + block : c->width, mine);
#ifdef _OPENMP
#pragma omp barrier
#endif
    for (int64_t i = all * me / threads; i < all * (me + 1) / threads; i++) {
      float v = c->down_bias ? at(c->down_bias, i % c->hidden, c->dtype) : 0;
      for (int64_t other = 0; other < threads; other++) v += sums[other * all + i];
      put(c->y, i, v, c->dtype);
    }
  }
}
"""


def _source() -> str:
    """Return the whole C file."""
    guards = {"plain": "1", "avx2": "defined(__x86_64__)", "avx512": "defined(__x86_64__)"}
    parts = [_TYPES]
    for name, primitives in _SETS.items():
        loops = (
            _LOOPS.replace("@SET", name).replace("@DTYPE", dtype).replace("@TYPE", c_type)
            for dtype, c_type in _C_TYPES.items()
        )
        ends = "".join(f"#undef {macro}\n" for macro in _MACROS)
        guard = guards.get(name, "defined(__aarch64__)")
        parts += [f"#if {guard}\n", primitives, *loops, ends, "#endif\n"]
    return "".join([*parts, _PAIRS, _CALL])


SOURCE = _source()


class _Call(ctypes.Structure):
    """`Call` of the C file."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    ]


# --- compiling and loading ------------------------------------------------------------------------


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Return the compiled kernel, or None where there can be none."""
    if os.environ.get(SWITCH) == "0" or os.name != "posix":
        return None
    _share_openmp()
    for folder in _folders():
        for flags in FLAGS:
            for compiler in _compilers():
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    return _loaded(folder, compiler, flags)
    return None


def _compilers() -> list[list[str]]:
    """Return the commands of the C compilers that are there, the user's own choice first."""
    named = [["cc"], ["gcc"], ["clang"]]
    with contextlib.suppress(ValueError):  # a quote that is left open
        named.insert(0, shlex.split(os.environ.get("CC", "")))
    return [command for command in named if command and shutil.which(command[0])]


def _folders() -> Iterator[Path]:
    """Yield folders of this user alone that can be written to."""
    folders = [Path(tempfile.gettempdir()) / f"surgery-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folders.insert(0, cache / "surgery")
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(folder, stat.S_IFDIR, 0o077):
                yield folder


def _is_private(path: Path, kind: int, closed: int) -> bool:
    """Return whether a path is of this kind (no link), ours, and closed to others in these ways."""
    try:
        found = path.lstat()
    except OSError:
        return False
    mine = stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid()
    return mine and not found.st_mode & closed


def _loaded(folder: Path, compiler: list[str], flags: tuple[str, ...]) -> ctypes.CDLL:
    """Return the library of these flags, compiled where it is not there yet.

    Raises OSError where it can be neither loaded nor made, SubprocessError for a compiler that
    fails.
    """
    machine = (platform.system(), platform.machine(), *platform.libc_ver())
    key = "\0".join([SOURCE, *flags, *machine])
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if _is_private(path, stat.S_IFREG, 0o022):
        with contextlib.suppress(OSError):
            return _open(path)
    _compile(path, compiler, flags)
    if not _is_private(path, stat.S_IFREG, 0o022):
        raise PermissionError(path)
    return _open(path)


def _compile(path: Path, compiler: list[str], flags: tuple[str, ...]) -> None:
    """Make the library under a name of its own, and then rename it, so that none is seen half."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source, made = Path(folder, "kernel.c"), Path(folder, "kernel.so")
        source.write_text(SOURCE)
        command = [*compiler, str(source), "-o", str(made), *flags]
        subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
        made.chmod(0o700)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # a library cut short by a power cut could be opened
        made.replace(path)


def _open(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.surgery_level.restype = ctypes.c_int64
    found.surgery_live_mlp.argtypes = [ctypes.POINTER(_Call)]
    found.surgery_live_mlp.restype = None
    return found


def _share_openmp() -> None:
    """Let the library find the OpenMP that torch has loaded, where only torch can see it."""
    maps = Path("/proc/self/maps")
    with contextlib.suppress(OSError):
        mapped = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
        runtimes = (p for p in mapped if Path(p).name.startswith(("libgomp", "libiomp", "libomp")))
        for path in sorted(runtimes, key=lambda p: "torch" not in p):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


# --- the operator ---------------------------------------------------------------------------------


@torch.compiler.assume_constant_result
def available() -> bool:
    """Return whether there is a kernel. The first call compiles it."""
    return compiled() is not None


@functools.cache
def best_level() -> int:
    """Return which of LEVELS is the best that this processor has, 0 where there is no kernel."""
    kernel = compiled()
    return 0 if kernel is None else int(kernel.surgery_level())


def fits(x: Tensor, rule: str, act: str) -> bool:
    """Return whether the kernel can compute this, wherever the weights are like x."""
    few = x.numel() <= MOST_TOKENS * x.shape[-1]
    known = x.dtype in DTYPES and rule in RULES and act in ACTIVATIONS
    return few and known and x.device.type == "cpu" and available()


def compute(x: Tensor, *others: Any, level: int = -1) -> Tensor:
    """Return the MLP's output [..., H] for x [..., H] of at most MOST_TOKENS tokens.

    The others are the rest of _TENSORS, in that order, then the names of the rule and the
    activation. gate, up and down are [F, H], with a row of memory for each neuron. All have one
    dtype, except for the thresholds t and t_up, [1] or [F] in fp32. What there is none of is None:
    gate, biases or thresholds. `level` chooses among LEVELS; the best that the processor has is
    the default.
    """
    *weights, rule, act = others
    _, up, _, _, _, _, t, t_up = weights
    kernel = compiled()
    if kernel is None:
        raise RuntimeError(f"no kernel: there is no C compiler, or {SWITCH}=0")
    x = x.contiguous()
    y, threads = torch.empty_like(x), torch.get_num_threads()
    scratch = torch.empty((threads + 1) * x.numel(), dtype=torch.float32)
    tensors = (x, *weights, y, scratch)
    call = _Call(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(x.numel() // x.shape[-1], x.shape[-1], up.shape[0]),
        *(int(per is not None and len(per) > 1) for per in (t, t_up)),
        *(DTYPES[x.dtype], RULES.index(rule), ACTIVATIONS.index(act), threads),
        best_level() if level < 0 else level,
    )
    kernel.surgery_live_mlp(call)
    return y


def _define() -> Any:
    """Return the operator, which compile and export keep as it is.

    Each checkpoint brings its own copy of this file, so its name has the version of the source: the
    first copy defines it, and copies of the same version share it.
    """
    name = f"live_mlp_{hashlib.sha256(SOURCE.encode()).hexdigest()[:8]}"
    if not hasattr(torch.ops.surgery, name):
        needed = ("x", "up", "down")
        tensors = ", ".join(f"Tensor{'' if n in needed else '?'} {n}" for n in _TENSORS)
        _DEFINITIONS.define(f"{name}({tensors}, str rule, str act) -> Tensor")
        _DEFINITIONS.impl(name, compute, "CPU")
        operators.register_fake(f"surgery::{name}", _fake, lib=_DEFINITIONS)
    return getattr(torch.ops.surgery, name)


def _fake(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_DEFINITIONS = operators.Library("surgery", "FRAGMENT")
live_mlp = _define()
